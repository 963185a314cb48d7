"""All readers: one for each kind of file that metabridge reads."""

from __future__ import annotations

from fuzz.datasets import DATASET_READERS
from fuzz.images import FOLDER_READER, IMAGE_READERS
from fuzz.runs import RUN_READERS
from fuzz.settings import SETTINGS_READERS

ALL_READERS = (*IMAGE_READERS, FOLDER_READER, *DATASET_READERS, *RUN_READERS, *SETTINGS_READERS)
READERS = {reader.name: reader for reader in ALL_READERS}
