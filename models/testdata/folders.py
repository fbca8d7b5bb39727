#!/usr/bin/env python3
"""Makes folders of models and adapters with random keys, options and tensors, and what transformers
and PEFT compute with them. Needs torch, transformers and peft.

    python3 folders.py DIRECTORY COUNT [SEED]

DIRECTORY/N has model and, for about half of the numbers, adapter; expected.safetensors, which has
tokens [1, 24] and logits [1, 24, vocabulary], unless transformers or PEFT refuse the folder, and
for models of 256 positions greedy [1, 200], which continues the first 8 tokens; and what.json,
which says what is random in it.
"""
import copy
import json
import os
import random
import shutil
import sys
import warnings

warnings.filterwarnings("ignore")

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers import GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCABULARY, LENGTH, LONG = 61, 24, 256


def ropes(rng, half):
    """Returns random rope parameters for heads of 2*half elements."""
    kind = rng.choice(["default", "linear", "dynamic", "yarn", "llama3", "longrope"])
    rope = {rng.choice(["rope_type", "rope_type", "type"]): kind}
    if rng.random() < 0.5:
        rope["rope_theta"] = rng.choice([100.0, 10000.0, 5e5])
    if kind != "default" and (kind != "longrope" or rng.random() < 0.5):
        rope["factor"] = rng.choice([1.0, 2.0, 8.0])
    if kind in ("yarn", "llama3", "longrope") and rng.random() < 0.8:
        rope["original_max_position_embeddings"] = rng.choice([8, 16, 32])
    if kind == "llama3":
        rope["rope_theta"] = 5e4
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": rng.choice([2.0, 4.0])}
    if kind == "yarn":
        for key, values in {"attention_factor": [0.7, None], "beta_fast": [16, 32.0],
                            "beta_slow": [1, 2], "mscale": [0.7], "mscale_all_dim": [0.9],
                            "truncate": [False, True]}.items():
            if rng.random() < 0.4:
                rope[key] = rng.choice(values)
    if kind == "longrope":
        rope["short_factor"] = [1.0 + 0.1 * i for i in range(half)]
        rope["long_factor"] = [2.0 + 0.3 * i for i in range(half)]
        if rng.random() < 0.3:
            rope["attention_factor"] = 1.3
    if rng.random() < 0.1:
        rope["partial_rotary_factor"] = rng.choice([0.5, 1.0])
    return rope


def config(rng):
    """Returns a random configuration, of sizes that only the file says."""
    kind = rng.choice(["gpt2", "llama", "mistral", "qwen2", "qwen3"])
    if kind == "gpt2":
        return GPT2Config(vocab_size=VOCABULARY, n_positions=rng.choice([32, LONG]), n_embd=24,
                          n_layer=3, n_head=4, n_inner=rng.choice([None, 40]), bos_token_id=1, eos_token_id=2,
                          tie_word_embeddings=rng.random() < 0.7)
    shared = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
                  num_attention_heads=8, num_key_value_heads=rng.choice([2, 8]),
                  max_position_embeddings=rng.choice([16, 32, 64, LONG]),
                  bos_token_id=1, eos_token_id=2,
                  tie_word_embeddings=rng.random() < 0.3)
    width = 4
    if kind != "qwen2" and rng.random() < 0.3:
        width = shared["head_dim"] = 6
    if kind == "qwen3" and width == 4:
        shared["head_dim"] = 4
    if rng.random() < 0.5:
        shared["rope_parameters"] = ropes(rng, width // 2) | {"rope_theta": 1e4}
    if kind == "llama":
        return LlamaConfig(**shared, attention_bias=rng.random() < 0.3, mlp_bias=rng.random() < 0.3)
    if kind == "mistral":
        return MistralConfig(**shared, sliding_window=rng.choice([None, 5, 4096]))
    more = dict(use_sliding_window=rng.random() < 0.5, sliding_window=rng.choice([5, 64]),
                max_window_layers=rng.choice([0, 1, 2, 28]))
    if kind == "qwen2":
        return Qwen2Config(**shared, **more)
    return Qwen3Config(**shared, attention_bias=rng.random() < 0.3, **more)


# Keys and values that a folder may have: of the classes, of others, and of none.
KEYS = {
    "attention_bias": [True, False], "mlp_bias": [True, False], "attention_dropout": [0.1, 0.0],
    "sliding_window": [None, 5, 100], "use_sliding_window": [True, False],
    "max_window_layers": [1, 3], "hidden_act": ["silu", "gelu", "relu", "swish"],
    "activation_function": ["gelu", "gelu_new", "relu", "gelu_fast", "quick_gelu"],
    "rms_norm_eps": [1e-6, 1e-2], "layer_norm_epsilon": [1e-5, 1e-2],
    "tie_word_embeddings": [True, False], "use_cache": [True, False], "torch_dtype": ["float16"],
    "dtype": ["bfloat16"], "initializer_range": [0.5], "pretraining_tp": [1, 2],
    "scale_attn_weights": [True, False], "scale_attn_by_inverse_layer_idx": [True, False],
    "reorder_and_upcast_attn": [True], "resid_pdrop": [0.3], "summary_type": ["mean"],
    "is_causal": [True, False], "layer_types": [["full_attention"] * 3,
        ["sliding_attention"] * 3, ["full_attention", "sliding_attention", "full_attention"]],
    "per_layer_config": [{"1": {"num_key_value_heads": 4}}, {}],
    "partial_rotary_factor": [0.5, 1.0], "rope_theta": [500.0, 10000.0],
    "rope_parameters": ["ropes", None], "rope_scaling": ["ropes", None],
    "head_dim": [4, None], "num_key_value_heads": [None], "max_position_embeddings": [16, 4000],
    "architectures": [["LlamaForSequenceClassification"], ["LlamaForCausalLM"], []],
    "quantization_config": [None], "pad_token_id": [0, None], "temperature": [0.5],
    "repetition_penalty": [1.3], "is_decoder": [True], "add_cross_attention": [True, False],
    "is_encoder_decoder": [False], "n_inner": [None, 48], "hidden_size": [24, 32], "n_ctx": [16],
    "attn_implementation": ["sdpa"], "_name_or_path": ["x"],
}
FOREIGN = {
    "logits_to_keep": [1], "final_logit_softcapping": [5.0], "attn_logit_softcapping": [5.0],
    "attention_multiplier": [0.5], "residual_multiplier": [2.0], "embedding_multiplier": [3.0],
    "logits_scaling": [2.0], "use_qk_norm": [True], "chunk_size_feed_forward": [0, 4],
    "foo": [1, "x", {"a": 1}, [1], 0, False, None],
}
MISSING = ["sliding_window", "use_sliding_window", "rms_norm_eps", "hidden_act", "rope_parameters",
           "tie_word_embeddings", "max_position_embeddings", "attention_bias", "head_dim",
           "layer_norm_epsilon", "activation_function", "layer_types", "max_window_layers",
           "n_inner", "mlp_bias", "num_key_value_heads", "architectures", "eos_token_id"]


def change_config(rng, folder, what):
    path = os.path.join(folder, "config.json")
    c = json.load(open(path))
    for key in rng.sample(MISSING, rng.choice([0, 0, 1, 2])):
        if key in c:
            what.append("config without " + key)
            del c[key]
    known = (c["model_type"] == "gpt2" and
             "pdrop attn tie use dtype init summary arch pad n_".split())
    keys = [k for k in sorted(KEYS) if not known or any(w in k for w in known)]
    keys = rng.sample(keys, rng.choice([0, 1, 1, 2]))
    for key in keys + rng.sample(sorted(FOREIGN), rng.choice([0, 0, 0, 1])):
        value = rng.choice((KEYS | FOREIGN)[key])
        c[key] = ropes(rng, c.get("head_dim", 4) // 2) if value == "ropes" else value
        what.append(f"config {key}={c[key]}")
    json.dump(c, open(path, "w"))


def change_tensors(rng, folder, what):
    path = os.path.join(folder, "model.safetensors")
    tensors = load_file(path)
    blocks = [n for n in tensors if "layers.0." in n or "h.0." in n]
    choice = rng.randrange(20)
    what.append(f"tensors {choice}")
    embedding = next(n for n in tensors if n.endswith(("embed_tokens.weight", "wte.weight")))
    if choice == 0:  # of the model without a head
        tensors = {n.removeprefix("model.").removeprefix("transformer."): t
                   for n, t in tensors.items()}
    elif choice == 1:
        tensors["lm_head.weight"] = tensors[embedding] + 0.1
    elif choice == 2:
        tensors["lm_head.weight"] = tensors[embedding].clone()
    elif choice == 3 and "lm_head.weight" in tensors:
        del tensors["lm_head.weight"]
    elif choice == 4:
        tensors["lm_head.weight"] = tensors.pop(embedding)
    elif choice == 5:
        inv = 1.0 / 10000.0 ** (torch.arange(0, 4, 2).float() / 4)
        for i in range(3):
            tensors[f"model.layers.{i}.self_attn.rotary_emb.inv_freq"] = inv * rng.choice([1, 1, 2])
    elif choice == 6:
        tensors["h.0.attn.bias"] = torch.ones(32, 32).tril().view(1, 1, 32, 32).bool()
        tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    elif choice == 7:
        tensors["extra.weight"] = torch.ones(3)
    elif choice == 8:
        del tensors[rng.choice(blocks)]
    elif choice == 9:
        tensors = {n: t.to(rng.choice([torch.bfloat16, torch.float16])) for n, t in tensors.items()}
    elif choice == 10:
        name = rng.choice(blocks)
        tensors[name.rsplit(".", 1)[0] + ".bias"] = torch.ones(tensors[name].shape[0])
    elif choice == 11:
        names = sorted(tensors)
        os.remove(path)
        parts = [names[::2], names[1::2]]
        index = {}
        for i, part in enumerate(parts):
            file = f"model-0000{i + 1}-of-00002.safetensors"
            save_file({n: tensors[n] for n in part}, os.path.join(folder, file), {"format": "pt"})
            index |= {n: file for n in part}
        json.dump({"metadata": {}, "weight_map": index},
                  open(path + ".index.json", "w"))
        return
    save_file({n: t.contiguous() for n, t in tensors.items()}, path, {"format": "pt"})


def targets(rng, gpt2):
    last = (["c_attn", "c_proj", "c_fc"] if gpt2 else
            ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
    layer = "transformer.h.%d." if gpt2 else "model.layers.%d."
    parts = ["attn.c_attn", "mlp.c_proj", "mlp.c_fc"] if gpt2 else [
        "self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"]
    return rng.choice([
        lambda: None, lambda: "all-linear", lambda: "All-Linear",
        lambda: rng.sample(last, rng.choice([1, 2, 3])),
        lambda: rng.sample(last, rng.choice([1, 2, 3])),
        lambda: [rng.choice(parts)], lambda: [layer % 1 + p for p in parts],
        lambda: [layer % 0 + parts[0], last[2]],
        lambda: r".*\.(%s|%s)" % (last[0], last[1]),
        lambda: r".*\.\d+\.%s" % parts[0].replace(".", r"\."),
        lambda: r".*[02]\..*_(proj|fc|attn)$", lambda: r"(model|transformer)\.\w+\.1.{3,40}_proj",
        lambda: r".*\.(?!k_)[a-z]*_proj", lambda: r".*attn", lambda: ["lm_head", last[0]],
        lambda: ["embed_tokens", last[0]], lambda: ["wte", last[0]], lambda: ["nothing"],
        lambda: ["nothing", last[0]], lambda: ["proj"], lambda: ["mlp"],
    ])()


def lora(rng, gpt2):
    """Returns random options of a LoraConfig."""
    o = dict(r=rng.choice([1, 2, 3, 4, 8]), lora_alpha=rng.choice([0, 1, 8, 16]),
             target_modules=targets(rng, gpt2), task_type="CAUSAL_LM", fan_in_fan_out=gpt2)
    last = ["c_attn", "c_proj"] if gpt2 else ["q_proj", "down_proj"]
    options = {
        "use_rslora": [True], "lora_dropout": [0.3], "bias": ["all", "lora_only"],
        "rank_pattern": [{last[0]: 2}, {r".*\.1\..*": 5, last[0]: 2}, {"^nothing": 3}],
        "alpha_pattern": [{last[0]: 3}, {r"layers\.0\..*": 5, r"h\.0\..*": 2}],
        "exclude_modules": [[last[1]], r".*\.0\..*", ["mlp." + last[1]]],
        "layers_to_transform": [[0], 1, [0, 2], []], "layers_pattern": ["layers", ["h"], "h", ""],
        "modules_to_save": [["lm_head"], ["embed_tokens"], ["wte"], ["norm"], ["ln_f"], ["mlp"],
                            ["input_layernorm", "lm_head"], ["nothing"], ["proj"]],
        "init_lora_weights": [False, "gaussian", "orthogonal", "pissa", "pissa_niter_2", "olora",
                              "mica"],
        "use_dora": [True], "lora_bias": [True], "trainable_token_indices": [[1, 2]],
        "alora_invocation_tokens": [[5], []], "layer_replication": [[[0, 2], [1, 3]]],
        "ensure_weight_tying": [True], "target_parameters": [["mlp.up_proj.weight"]],
    }
    for key in rng.sample(sorted(options), rng.choice([0, 1, 1, 2, 3])):
        o[key] = rng.choice(options[key])
    return o


def change_adapter(rng, folder, what):
    path = os.path.join(folder, "adapter_config.json")
    c = json.load(open(path))
    for _ in range(rng.choice([0, 0, 1])):
        key, value = rng.choice([("r", None), ("lora_alpha", None), ("foo", 1), ("foo", None),
                                 ("lora_alpha", 0), ("bias", "all"), ("use_rslora", True),
                                 ("task_type", "SEQ_CLS"), ("task_type", None),
                                 ("peft_type", "LOHA"),
                                 ("inference_mode", False), ("target_modules", None),
                                 ("init_lora_weights", "pissa"), ("lora_alpha", 2.5)])
        if value is None:
            c.pop(key, None)
        else:
            c[key] = value
        what.append(f"adapter_config {key}={value}")
    json.dump(c, open(path, "w"))


def make(rng, folder):
    what, model, adapter = [], os.path.join(folder, "model"), os.path.join(folder, "adapter")
    torch.manual_seed(rng.randrange(1 << 30))
    net = None
    while net is None:
        c = config(rng)
        try:
            net = AutoModelForCausalLM.from_config(c).float()
        except Exception:  # such as rotary positions of a half of 4 elements
            pass
    what.append(c.model_type)
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(torch.randn_like(weight) * 0.15)
        net.save_pretrained(model)
    os.remove(os.path.join(model, "generation_config.json"))
    adapted = rng.random() < 0.5
    if not adapted or rng.random() < 0.3:
        change_tensors(rng, model, what)
        change_config(rng, model, what)
    tokens = torch.randint(0, VOCABULARY, (1, LENGTH))
    save_file({"tokens": tokens}, os.path.join(folder, "tokens.safetensors"))
    try:
        base = AutoModelForCausalLM.from_pretrained(
            model, attn_implementation="eager", dtype=torch.float32).eval()
        if adapted:
            p = None
            while p is None:
                options = lora(rng, c.model_type == "gpt2")
                try:
                    p = get_peft_model(copy.deepcopy(base), LoraConfig(**options))
                except Exception:  # options that do not go together, or layers that there are not
                    pass
            what.append(f"lora {options}")
            with torch.no_grad():
                for weight in p.parameters():
                    if weight.requires_grad:
                        weight.add_(torch.randn_like(weight) * 0.15)
            p.save_pretrained(adapter)
            change_adapter(rng, adapter, what)
            base = PeftModel.from_pretrained(base, adapter).eval()
        with torch.no_grad():
            expected = {"tokens": tokens, "logits": base(tokens).logits.float().contiguous()}
            if base.config.max_position_embeddings == LONG:
                row = tokens[:, :8]
                for _ in range(200):
                    best = base(row).logits[:, -1].argmax(-1, keepdim=True)
                    row = torch.cat([row, best], 1)
                expected["greedy"] = row[:, 8:].contiguous()
        save_file(expected, os.path.join(folder, "expected.safetensors"))
    except Exception as e:  # whatever they refuse
        what.append(f"{type(e).__name__}: {e}"[:300])
    json.dump(what, open(os.path.join(folder, "what.json"), "w"))


def main():
    directory, count = sys.argv[1], int(sys.argv[2])
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    torch.set_num_threads(1)
    for i in range(count):
        folder = os.path.join(directory, str(i))
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        make(random.Random(seed * 1_000_003 + i), folder)


if __name__ == "__main__":
    main()
