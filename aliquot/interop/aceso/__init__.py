"""Aceso's measured databases, its configurations and its performance model.

Names that concern plans are imported on first use (PEP 562): they need JAX, whose import takes
longer than many searches.
"""

import importlib
import typing

from ._chain import Operator as Operator
from ._chain import OperatorChain as OperatorChain
from ._chain import built_in_chains as built_in_chains
from ._chain import make_chain as make_chain
from ._chain import measured_size as measured_size
from ._chain import read_chain as read_chain
from ._configuration import Configuration as Configuration
from ._configuration import StageConfiguration as StageConfiguration
from ._configuration import configuration_to_dict as configuration_to_dict
from ._configuration import read_configuration as read_configuration
from ._configuration import write_configuration as write_configuration
from ._database import Database as Database
from ._database import load_database as load_database
from ._database import models_in as models_in
from ._judge import ACESO as ACESO
from ._judge import JUDGES as JUDGES
from ._judge import Faults as Faults
from ._judge import Judge as Judge
from ._judge import find_judge as find_judge
from ._performance import Estimate as Estimate
from ._performance import StageEstimate as StageEstimate
from ._performance import evaluate_configuration as evaluate_configuration
from ._published import PAPER_SIZES as PAPER_SIZES
from ._published import PAPER_TITLES as PAPER_TITLES
from ._published import PublishedTables as PublishedTables
from ._published import accuracy_rows as accuracy_rows
from ._write_database import DatabaseContent as DatabaseContent
from ._write_database import OperatorRow as OperatorRow
from ._write_database import write_database as write_database

if typing.TYPE_CHECKING:
    from ._export_plan import configuration_of as configuration_of
    from ._import_plan import configuration_faults as configuration_faults
    from ._import_plan import plan_of as plan_of
    from ._modelled_database import ModelShape as ModelShape
    from ._modelled_database import modelled_database as modelled_database
    from ._operator_map import OperatorMap as OperatorMap
    from ._operator_map import map_operators as map_operators
    from ._resnet_rows import BlockShape as BlockShape
    from ._resnet_rows import ResNetShape as ResNetShape
    from ._transformer_rows import TransformerShape as TransformerShape

_MODULE_OF = {
    "configuration_of": "_export_plan",
    "BlockShape": "_resnet_rows",
    "ModelShape": "_modelled_database",
    "modelled_database": "_modelled_database",
    "ResNetShape": "_resnet_rows",
    "TransformerShape": "_transformer_rows",
    "OperatorMap": "_operator_map",
    "map_operators": "_operator_map",
    "configuration_faults": "_import_plan",
    "plan_of": "_import_plan",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value
