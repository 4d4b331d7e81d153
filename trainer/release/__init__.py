"""Release: from a candidate that a round or a prompt change made to the live version, or out again.

The life of a version (states of `ratchet.store.states.PolicyState`):

    candidate   a round is committed, or a prompt is changed
        |       candidates.py      select the next candidate; skip or reject those that it overtakes
        |       publisher.py       load its adapter on every replica under a new name
        |       proof.py           prove by logprobs that vLLM serves what the trainer made
        |           wrong          -> rejected, with an alarm
        |           undecided      -> unproven: serves nobody, training continues from it
        |       evaluation.py      both versions answer recent prompts, in the background; no judge
        |           invariants.py  clearly broken -> rejected, pure
        |       evaluation.py      compare it with the live version on held-out tasks, in the background
        |           worse          -> rejected
        |       publisher.py       the gain is too large, or a judge disagrees: a person decides
        v
    ramp        it serves a share of new trajectories beside the live version and the anchor
        |       release_evidence.py    reads what trajectories came to; evidence.py, pure, bets on it
        |       policy.py              decides: end the ramp, roll back, move the anchor, change shares; pure
        |       release_controller.py  has the store carry the decision out
        |       release_controller.py  before the end of a ramp: too large a gain, a second judge, the sentinel
        v
    live        it serves the rest of new trajectories
        v
    holdback    it was live, and is the anchor that later versions are compared with
        v
    retired     publisher.py unloads its adapter when no trajectory needs it; release_controller.py names the folders
                to delete

The controller drives this: it asks for the next candidate, publishes it, and has the release
controller decide. Publisher and release controller do not know each other; both write their decisions to the store.
"""
