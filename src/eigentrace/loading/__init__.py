"""What a user's words mean: a function, folders of a model and a dataset, or a file of settings, as task and data."""

from eigentrace.loading.function import from_function
from eigentrace.loading.inputs import Inputs
from eigentrace.loading.model_folder import from_folder
from eigentrace.loading.settings_file import check_source, from_config, make_inputs, show_of

__all__ = ["Inputs", "from_function", "from_folder", "from_config", "make_inputs", "show_of", "check_source"]
