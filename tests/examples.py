"""Hypothesis: the same examples every time where CI is set; `make deep` plays more of them."""

import os

from hypothesis import HealthCheck, settings

settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, database=None)
settings.register_profile("deep", settings.get_profile("dev"), max_examples=2000)
_profile = os.environ.get("HYPOTHESIS_PROFILE")  # noqa: TID251
settings.load_profile(_profile or ("ci" if os.environ.get("CI") else "dev"))  # noqa: TID251
