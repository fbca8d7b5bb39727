#!/usr/bin/env python3
"""Makes generation.json: what transformers generates from folders of this directory with other files
of generation, greedily, and which tokens it may draw. Needs torch and transformers.

    python3 generation.py [NUMBER]

The first cases are by hand, and others are random; without NUMBER there are 24 of these. Each case has
the folder, the keys that config.json gets, generation_config.json (null: there is none), and what
comes after the prompt: the tokens of a greedy continuation, or null where transformers would draw or
refuses. draws has, for values of sampling, logits and the tokens that transformers may draw.
"""
import json
import os
import random
import shutil
import sys
import tempfile
import warnings

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.utils import GenerationMixin

HERE = os.path.dirname(os.path.abspath(__file__))
PROMPT = [1, 5, 7, 9, 11, 3]
BY_HAND = [
    ({}, None), ({}, {}), ({}, {"bos_token_id": 1}), ({}, {"eos_token_id": None}),
    ({"eos_token_id": 33}, None), ({"eos_token_id": 33}, {}), ({}, {"eos_token_id": 33}),
    ({}, {"eos_token_id": [2, 38, 13]}), ({"eos_token_id": 33}, {"eos_token_id": 16}),
    ({"eos_token_id": None}, {"eos_token_id": [13]}), ({}, {"eos_token_id": -1}),
    ({"repetition_penalty": 2.5}, None), ({"repetition_penalty": 2.5}, {"eos_token_id": 2}),
    ({}, {"repetition_penalty": 1.3}), ({}, {"repetition_penalty": 0.5}),
    ({}, {"max_new_tokens": 3}), ({}, {"max_length": 10}), ({}, {"max_length": 6}),
    ({}, {"max_length": 9, "max_new_tokens": 5}), ({"max_length": 9}, None),
    ({}, {"temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.2}),
]
# Values of keys that may change tokens, and of keys that never do.
VALUES = {
    "eos_token_id": [2, 33, [2, 38], [13, 49], None], "repetition_penalty": [1.0, 1.2, 1.7, 0.8],
    "max_new_tokens": [1, 4, 9], "max_length": [8, 15, 20], "temperature": [0.6, 1.0],
    "top_k": [0, 5, 50], "top_p": [0.9, 1.0], "pad_token_id": [0, 2], "num_beams": [1, 3],
    "no_repeat_ngram_size": [0, 2], "bad_words_ids": [[[33]]], "suppress_tokens": [[49, 33]],
    "begin_suppress_tokens": [[35]], "forced_bos_token_id": [5], "forced_eos_token_id": [2],
    "min_length": [0, 12], "min_new_tokens": [5], "exponential_decay_length_penalty": [[2, 1.5]],
    "sequence_bias": [[[[33], -10.0]]], "length_penalty": [1.0, 2.0], "early_stopping": [True],
    "use_cache": [True, False], "renormalize_logits": [True], "remove_invalid_values": [True],
    "encoder_repetition_penalty": [1.0, 1.5], "encoder_no_repeat_ngram_size": [2],
    "guidance_scale": [1.0, 1.5], "typical_p": [1.0, 0.5], "epsilon_cutoff": [0.0, 0.3],
    "output_scores": [False], "num_return_sequences": [1], "transformers_version": ["5.24.0"],
}


def generated(folder, config, generation):
    with tempfile.TemporaryDirectory() as scratch:
        directory = os.path.join(scratch, folder)
        shutil.copytree(os.path.join(HERE, folder), directory)
        path = os.path.join(directory, "config.json")
        with open(path) as f:
            keys = json.load(f) | config
        with open(path, "w") as f:
            json.dump(keys, f)
        if generation is not None:
            with open(os.path.join(directory, "generation_config.json"), "w") as f:
                json.dump(generation, f)
        try:
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
            # As here, a length that no file gives has no default.
            length = {}
            if model.generation_config.max_length is None and \
                    model.generation_config.max_new_tokens is None:
                length = {"max_new_tokens": 20}
            out = model.generate(torch.tensor([PROMPT]), **length,
                                 attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long))
            out = out[0, len(PROMPT):].tolist()
        except (ValueError, TypeError, RuntimeError, IndexError):
            return None
        stop = model.generation_config.eos_token_id
        stop = [stop] if isinstance(stop, int) else stop or []
        return out[:-1] if out and out[-1] in stop else out  # which callers do not get


def draws(r):
    out = []
    for _ in range(40):
        values = {"temperature": r.choice([0.4, 1.0, 1.7]), "top_k": r.choice([0, 3, 20, 50]),
                  "top_p": r.choice([0.3, 0.9, 1.0]), "min_p": r.choice([0.0, 0.05, 0.4]),
                  "repetition_penalty": r.choice([1.0, 1.5])}
        logits = [round(r.gauss(0, 2), 3) for _ in range(61)]
        ids = torch.tensor([[r.randrange(61) for _ in range(5)]])
        config = GenerationConfig(do_sample=True, **values)
        config._eos_token_tensor = None
        model = type("Model", (GenerationMixin,), {})()
        model.config = type("Config", (), {"is_encoder_decoder": False})()
        process = model._get_logits_processor(config, input_ids_seq_length=5)
        scores = process(ids, torch.tensor([logits]))
        kept = torch.isfinite(scores[0]).nonzero().flatten().tolist()
        out.append({"generation": values | {"do_sample": True}, "logits": logits,
                    "tokens": ids[0].tolist(), "kept": kept})
    return out


def main():
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(50)
    transformers.logging.disable_progress_bar()
    r = random.Random(1)
    cases = list(BY_HAND)
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 24):
        keys = r.sample(sorted(VALUES), r.randrange(1, 5))
        some = {key: r.choice(VALUES[key]) for key in keys}
        cases.append((some, None) if r.randrange(5) == 0 else ({}, some))
    out = []
    for i, (config, generation) in enumerate(cases):
        folder = ["llama3", "gpt2", "qwen2"][i % 3 if i >= len(BY_HAND) else 0]
        out.append({"folder": folder, "config": config, "generation": generation,
                    "tokens": generated(folder, config, generation)})
    text = ",\n".join(json.dumps(x) for x in out)
    drawn = ",\n".join(json.dumps(x, separators=(",", ":")) for x in draws(r))
    name = os.path.join(HERE, "generation.json") if len(sys.argv) < 2 else "/dev/stdout"
    with open(name, "w") as f:
        f.write('{"prompt": %s, "cases": [\n%s\n], "draws": [\n%s\n]}\n' % (PROMPT, text, drawn))


if __name__ == "__main__":
    main()
