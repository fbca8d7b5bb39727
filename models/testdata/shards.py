"""Compares the files of a folder with those into which huggingface_hub divides its tensors."""
import json
import os
import re
import sys

from huggingface_hub.serialization._base import split_state_dict_into_shards_factory
from safetensors import safe_open

folder, most = sys.argv[1], int(sys.argv[2])
names = sorted(f for f in os.listdir(folder) if f.endswith(".safetensors"))
found, sizes = {}, {}
for name in names:
    with safe_open(os.path.join(folder, name), "np") as f:
        for key in f.keys():
            found[key] = name
            sizes[key] = f.get_tensor(key).nbytes
order = sorted(sizes, key=lambda n: "".join(p.rjust(12) if p.isdigit() else p
                                            for p in re.split(r"(\d+)", n)))
want = split_state_dict_into_shards_factory(
    {k: (k,) for k in order}, get_storage_size=lambda t: sizes[t[0]], filename_pattern="model{suffix}.safetensors",
    get_storage_id=lambda t: None, max_shard_size=most)
assert found == want.tensor_to_filename, (found, want.tensor_to_filename)
if want.is_sharded:
    with open(os.path.join(folder, "model.safetensors.index.json")) as f:
        index = json.load(f)
    assert index["weight_map"] == found, index
    assert index["metadata"]["total_size"] == want.metadata["total_size"], index
