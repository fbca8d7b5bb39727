#!/usr/bin/env python3
"""Compares what transformers and PEFT compute with folders that Save and SaveAdapter have written.

    python3 check.py TESTDATA FOLDER ADAPTER [TESTDATA FOLDER ADAPTER ...]

The model of each FOLDER, with the adapter of ADAPTER unless it is "-", gets the tokens of
TESTDATA/expected.safetensors. The logits must equal the file's, of the name "logits" or
"adapter.logits".
"""
import os
import sys

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def compare(testdata, folder, adapter):
    expected = load_file(os.path.join(testdata, "expected.safetensors"))
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32)
    name = "logits"
    if adapter != "-":
        model = PeftModel.from_pretrained(model, adapter)
        name = "adapter.logits" if "adapter.logits" in expected else name
    with torch.no_grad():
        logits = model.eval()(expected["tokens"]).logits
    off = ((logits - expected[name]).abs().max() / expected[name].abs().max()).item()
    if not off <= 1e-5:
        sys.exit(f"{testdata}: {name} differ by {off} of the largest")


for i in range(1, len(sys.argv), 3):
    compare(*sys.argv[i:i + 3])
