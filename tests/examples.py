"""How many examples Hypothesis draws: fewer where each takes long, as under a sanitizer.

No example has a deadline: how long one takes says nothing on a busy machine.
"""

from hypothesis import settings

settings.register_profile("untimed", settings.default, deadline=None)
settings.load_profile("untimed")
USUAL = settings.default.max_examples
settings.register_profile("brief", settings.default, max_examples=USUAL // 10)


def examples(usual: int) -> int:
    """`usual`, or a tenth of it under `--hypothesis-profile=brief`; for `max_examples`."""
    return max(4, usual * settings.default.max_examples // USUAL)
