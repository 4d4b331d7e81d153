"""The journal: records of calls on local disk, until the store has them."""
