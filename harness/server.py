"""What the server of processes does once, so that no process that is forked from it has to.

The server imports it last, as it freezes what was imported before. No other module imports it.
"""

from __future__ import annotations

import gc

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

# A process compiles a thousand regular expressions when it loads or saves its first model, which is
# a third of the time of a small dump.
get_checkpoint_conversion_mapping("bert")
# A garbage collection in a forked process would scan all imported objects, and so copy their pages.
gc.freeze()
