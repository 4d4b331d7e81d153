"""Release: from a candidate that a round or a prompt change made to the live version, or out again.

The life of a version (states of `ratchet.store.states.PolicyState`):

    candidate   a round is committed, or a prompt is changed
        |       candidates.py      select the next candidate; reject those that it overtakes
        |       publisher.py       load its adapter on every replica under a new name
        |       proof.py           prove by logprobs that vLLM serves what the trainer made
        |           wrong          -> rejected, with an alarm
        |           undecided      -> unproven: serves nobody, training continues from it
        |       evaluation_runner.py  compare it with the live version on held-out tasks, in the background
        |           worse          -> rejected
        |       approval.py        the gain is too large, or a judge disagrees: a person decides
        v
    canary      with `trainer.release.canary`: it serves a share of new trajectories
        |       decision.py        a sequential test on the scores of both versions, pure
        |       canary.py          carries the decision out: promote, roll back, or require approval
        |       second_opinion.py  a second judge on pairs of trajectories before a promotion
        v
    live        it serves all new trajectories
        v
    retired     publisher.py unloads its adapter when no trajectory needs it; retention.py names the folders to delete

The controller drives this: it asks for the next candidate, publishes it, and checks the canary. The publisher and the
canary controller do not know each other; both write their decisions to the store, and both use `approval.py`.
"""
