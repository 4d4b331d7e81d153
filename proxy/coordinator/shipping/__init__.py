"""From a call to the store, and never lost between: records, the journal on this disk, the shipper, the alarm_queue."""
