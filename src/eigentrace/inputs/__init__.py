"""What a user's words mean: a function, folders of a model and a dataset, or a file of settings, as task and data."""

from eigentrace.inputs.config import check_source, from_config, make_inputs, show_of
from eigentrace.inputs.folder import from_folder
from eigentrace.inputs.function import from_function
from eigentrace.inputs.made import Inputs

__all__ = ["Inputs", "from_function", "from_folder", "from_config", "make_inputs", "show_of", "check_source"]
