"""Settings of frameworks that others train with: read into this package's words, and written from
plans. The tables of names, one for each framework and version, are in `tables/`.
"""

from ._read import read_settings as read_settings
from ._rules import maxtext_axes as maxtext_axes
from ._settings import Found as Found
from ._settings import Settings as Settings
from ._settings import Written as Written
from ._table import Table as Table
from ._table import model_named as model_named
from ._table import tables as tables
from ._write import FRAMEWORKS as FRAMEWORKS
from ._write import export_plan as export_plan
from ._write import write_settings as write_settings
