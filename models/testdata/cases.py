#!/usr/bin/env python3
"""Makes cases/cases.json and the adapters there: what transformers and PEFT compute with the
folders of this directory when keys of their files are others. Needs torch, transformers and peft.

    python3 cases.py [DIRECTORY]

cases/defaults.json has what the classes of transformers take for keys that are missing.

A case has a folder, keys of config.json, null in "without" for those to be removed, an adapter and
keys of adapter_config.json; the logits of the last of the first row of tokens; and, for sliding
windows, the greedy continuation of its first 8 tokens.
"""
import json
import os
import shutil
import sys
import tempfile
import warnings

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers import GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

warnings.filterwarnings("ignore")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"type": "longrope", "short_factor": [1.0, 1.1], "long_factor": [2.0, 3.0], "factor": 4.0,
        "original_max_position_embeddings": 16}
CONFIGS = [
    ("mistral", {"sliding_window": 5}), ("mistral", {"sliding_window": 1}),
    ("mistral", {"sliding_window": 23}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1,
               "layer_types": None}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 4,
               "layer_types": ["sliding_attention", "full_attention"]}),
    ("llama3", {"tie_word_embeddings": True}), ("llama3", {"tie_word_embeddings": None}),
    ("llama3", {"rope_scaling": YARN}), ("llama3", {"rope_scaling": YARN | {"truncate": False}}),
    ("llama3", {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}}),
    ("llama3", {"rope_parameters": YARN | {"attention_factor": 0.8, "rope_theta": 500.0}}),
    ("llama3", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 4.0},
                "rope_theta": 500.0}),
    ("llama3", {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 500.0}),
    ("qwen2", {"rope_scaling": {"rope_type": "dynamic", "factor": 3.0},
               "max_position_embeddings": 16}),
    ("qwen2", {"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}}),
    ("mistral", {"rope_scaling": LONG}), ("mistral", {"rope_scaling": LONG | {
        "original_max_position_embeddings": 32}}),
    ("mistral", {"rope_parameters": None, "rms_norm_eps": None, "hidden_act": None,
                 "max_position_embeddings": None}),
    ("gpt2", {"activation_function": "gelu_fast", "layer_norm_epsilon": None, "n_inner": None}),
]
ADAPTERS = [  # with the adapters of make.py
    ("llama3", {"use_rslora": True}), ("llama3", {"lora_alpha": 0}),
    ("llama3", {"lora_alpha": None}),
    ("llama3", {"alpha_pattern": {"q_proj": 2, r".*layers\.1\..*": 9}}),
    ("llama3", {"target_modules": r".*\.(q|v|o|gate|down)_proj", "lora_dropout": 0.5}),
    ("gpt2", {"target_modules": "all-linear"}), ("gpt2", {"fan_in_fan_out": False}),
]
NEW = {  # adapters of their own
    "bias": ("qwen2", dict(bias="lora_only", target_modules=["q_proj", "o_proj"])),
    "biases": ("gpt2", dict(bias="all", target_modules=["h.1.mlp.c_proj"])),
    "saved": ("llama3-tied", dict(modules_to_save=["embed_tokens"], target_modules=["v_proj"])),
    "norms": ("qwen3", dict(modules_to_save=["input_layernorm", "lm_head"],
                            target_modules=["v_proj", "lm_head"])),
    "ranks": ("llama3", dict(rank_pattern={r"layers\.1\..*": 4, "v_proj": 1}, use_rslora=True,
                             target_modules="all-linear", exclude_modules=r".*mlp.*")),
    "layers": ("llama3", dict(layers_to_transform=[1], layers_pattern="layers", lora_bias=True,
                              target_modules=["q_proj", "down_proj",
                                              "model.layers.0.mlp.up_proj"])),
    "head": ("llama3", dict(target_modules=["lm_head"])),
}


def changed(path, changes):
    text = json.load(open(path))
    for key, value in changes.items():
        text[key] = value
        if value is None:
            del text[key]
    json.dump(text, open(path, "w"))


def main():
    directory = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__))
    cases = ([(f, c, None, {}) for f, c in CONFIGS] + [(f, {}, "adapter", c) for f, c in ADAPTERS]
             + [(f, {}, n, {}) for n, (f, _) in NEW.items()])
    out = []
    for folder, config, adapter, keys in cases:
        tokens = load_file(os.path.join(directory, folder, "expected.safetensors"))["tokens"][:1]
        with tempfile.TemporaryDirectory() as t:
            shutil.copytree(os.path.join(directory, folder), t, dirs_exist_ok=True)
            changed(os.path.join(t, "config.json"), config)
            model = AutoModelForCausalLM.from_pretrained(t, attn_implementation="eager").eval()
            if adapter in NEW:
                torch.manual_seed(len(out))
                model = get_peft_model(model, LoraConfig(r=2, lora_alpha=6, task_type="CAUSAL_LM",
                                                         **NEW[adapter][1]))
                with torch.no_grad():
                    for weight in model.parameters():
                        if weight.requires_grad:
                            weight.add_(torch.randn_like(weight) * 0.15)
                at = os.path.join(directory, "cases", adapter)
                shutil.rmtree(at, ignore_errors=True)
                model.peft_config["default"].base_model_name_or_path = folder
                model.save_pretrained(at)
                os.remove(os.path.join(at, "README.md"))
                model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(
                    t, attn_implementation="eager"), at).eval()
            elif adapter:
                changed(os.path.join(t, "adapter", "adapter_config.json"), keys)
                model = PeftModel.from_pretrained(model, os.path.join(t, "adapter")).eval()
            with torch.no_grad():
                case = {"folder": folder, "config": config, "adapter": adapter, "keys": keys,
                        "logits": [round(x, 6) for x in model(tokens).logits[0, -1].tolist()]}
                if "sliding_window" in config:
                    row = tokens[:, :8]
                    for _ in range(16):
                        best = model(row).logits[:, -1].argmax(-1, keepdim=True)
                        row = torch.cat([row, best], 1)
                    case["greedy"] = row[0, 8:].tolist()
            out.append(case)
    defaults = {}
    for config in (GPT2Config(), LlamaConfig(), MistralConfig(), Qwen2Config(), Qwen3Config()):
        defaults[config.model_type] = {k: getattr(config, k, None) for k in (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings",
            "rms_norm_eps", "tie_word_embeddings", "sliding_window", "bos_token_id",
            "eos_token_id", "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop")}
    json.dump(defaults, open(os.path.join(directory, "cases", "defaults.json"), "w"), indent=1)
    text = ",\n".join(json.dumps(case) for case in out)
    open(os.path.join(directory, "cases", "cases.json"), "w").write("[\n" + text + "\n]\n")


if __name__ == "__main__":
    main()
