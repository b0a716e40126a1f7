"""Loading of task and data from a user's function, a model folder and a dataset, or a settings file."""

from eigentrace.loading.dataset_check import warn_of_mistakes
from eigentrace.loading.function import from_function
from eigentrace.loading.inputs import Inputs
from eigentrace.loading.model_folder import from_folder
from eigentrace.loading.settings_file import check_source, from_config, make_inputs, show_of

__all__ = [
    "Inputs",
    "from_function",
    "from_folder",
    "from_config",
    "make_inputs",
    "show_of",
    "check_source",
    "warn_of_mistakes",
]
