"""How many examples Hypothesis draws: fewer where each takes long, as under a sanitizer."""

from hypothesis import settings

USUAL = settings.default.max_examples
settings.register_profile("brief", max_examples=USUAL // 10)


def examples(usual: int) -> int:
    """`usual`, or a tenth of it under `--hypothesis-profile=brief`; for `max_examples`."""
    return max(4, usual * settings.default.max_examples // USUAL)
