"""How hypothesis runs: no deadline, because a test must not fail for a busy machine."""

from hypothesis import settings

settings.register_profile("colibri", deadline=None)
settings.load_profile("colibri")
