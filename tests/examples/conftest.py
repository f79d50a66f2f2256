"""Before the first test: what tqdm makes once a process and keeps, its lock and its monitoring thread."""

from tqdm import tqdm

tqdm.get_lock()
tqdm.monitor_interval = 0  # no thread: it only repaints bars that stand still
