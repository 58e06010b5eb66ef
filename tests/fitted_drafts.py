"""Draft models that are right for given texts, by vLLM's name of the method."""

from tests.draft_checkpoints import fitted_eagle, fitted_medusa
from tests.eagle3_checkpoints import fitted_eagle3

FITTED = {"medusa": fitted_medusa, "eagle": fitted_eagle, "eagle3": fitted_eagle3}
