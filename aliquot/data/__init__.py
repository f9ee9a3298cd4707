"""Training data: text to tokens, files of tokens that stay on the disk, windows and mixtures of
them as batches, images, and the position in any source of batches.

Importing this package needs neither JAX nor a tokenizer's library.
"""

from ._feed import Feed as Feed
from ._images import Images as Images
from ._images import read_images as read_images
from ._indexed import is_indexed as is_indexed
from ._indexed import open_indexed as open_indexed
from ._mixture import Mixture as Mixture
from ._split import Split as Split
from ._text import documents as documents
from ._text import documents_of as documents_of
from ._text import listed as listed
from ._text import read_text as read_text
from ._text import standard_library as standard_library
from ._text import text_files as text_files
from ._token_file import TokenFile as TokenFile
from ._token_file import is_token_file as is_token_file
from ._token_file import write_tokens as write_tokens
from ._tokenizer import Tokenizer as Tokenizer
from ._tokenizer import byte_tokenizer as byte_tokenizer
from ._tokenizer import read_gpt2_tokenizer as read_gpt2_tokenizer
from ._tokenizer import read_tokenizer as read_tokenizer
from ._windows import Windows as Windows
