"""Block verification: the drafts of a round are accepted or rejected together.

Rejection may stop at a draft that is too likely by the drafter's law, although those behind it make
up for that. Here the joint ratio of the first i drafts is followed, bounded by 1,

    P_i = min(1, P_(i-1) * p_i / q_i),    P_0 = 1,

and the first i are accepted with the probability

    R / (R + 1 - P_i),    R = sum(max(P_i * p_(i+1) - q_(i+1), 0)),

all of them with P_gamma. What counts is the last i to which that happens. The token behind the
accepted drafts has the law max(P_i * p - q, 0). The text has the target's law, and no rule accepts
more drafts on average (Sun et al. 2025, arXiv:2403.10444). See `rejection` for p and q.
"""

from collections.abc import Sequence

import numpy as np

from workers.rejection import Decision, Happens, LawsAtDraft, Number


def decide_as_block(laws: Sequence[LawsAtDraft], happens: Happens) -> Decision:
    """Accept as many drafts as the last for which it happens; a failure before it means nothing.

    # laws [gamma]
    """
    decision, joint = Decision(num_accepted=0), 1
    for index, law in enumerate(laws):
        joint = min(joint * law.ratio, 1)
        following = laws[index + 1] if index + 1 < len(laws) else None
        if happens(index, _chance(joint, following)):
            decision = Decision(num_accepted=index + 1, scale=joint)
    return decision


def _chance(joint: Number, following: LawsAtDraft | None) -> Number:
    """The probability that drafts of this joint ratio are accepted before one that follows them.

    The block ends where no token may follow, whatever was drafted there.
    """
    if following is None or following.p.sum() + following.others == 0:
        return joint
    left = np.maximum(joint * following.p - following.q, 0).sum() + joint * following.others
    return left / (left + 1 - joint) if joint < 1 else 1
