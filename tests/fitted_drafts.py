"""Draft models that are right for given texts, and never, by vLLM's name of the method."""

from tests.draft_checkpoints import fitted_eagle, fitted_medusa, random_eagle, random_medusa
from tests.eagle3_checkpoints import fitted_eagle3, random_eagle3

FITTED = {"medusa": fitted_medusa, "eagle": fitted_eagle, "eagle3": fitted_eagle3}
RANDOM = {"medusa": random_medusa, "eagle": random_eagle, "eagle3": random_eagle3}
