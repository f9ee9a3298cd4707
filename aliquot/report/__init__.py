"""Floor 7: plans, differences and training curves as a person reads them, and as plain data."""

from ._charts import bar_chart as bar_chart
from ._charts import line_chart as line_chart
from ._compare import compared as compared
from ._compare import comparison as comparison
from ._comparison import Candidate as Candidate
from ._comparison import Comparison as Comparison
from ._comparison import comparison_table as comparison_table
from ._comparison import sorted_candidates as sorted_candidates
from ._curve import loss_chart as loss_chart
from ._diff import difference as difference
from ._explain import Alternative as Alternative
from ._explain import explained as explained
from ._explain import explanation as explanation
from ._page import page as page
from ._sizing import BatchSearch as BatchSearch
from ._sizing import BatchTrial as BatchTrial
from ._sizing import ClusterOption as ClusterOption
from ._sizing import Sizing as Sizing
from ._sizing import batch_table as batch_table
from ._sizing import sizing_table as sizing_table
from ._sizing import sorted_options as sorted_options
from ._tables import as_text as as_text
from ._tables import columns as columns
from ._trace import planned_trace as planned_trace
from ._verify import verification as verification
