#!/usr/bin/env python3
"""Makes the folders of this directory: tiny models of Hugging Face with random weights, and what
torch and transformers compute with them. Needs torch, transformers, tokenizers and
peft.

    python3 make.py [DIRECTORY]

Each folder has config.json, model.safetensors (qwen3 in two files with an index) and
expected.safetensors: tokens [2, 24], logits [2, 24, vocabulary], the mean loss of each next token,
the gradient of each weight as grad.NAME, and the greedy continuation of the first 8 tokens of each
row by 64 tokens, in f32. Two folders have an adapter of PEFT beside them, and llama3 has a
tokenizer.json for lowercase text.
"""
import os
import shutil
import sys

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM
from transformers import GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

VOCABULARY, POSITIONS = 61, 80
SIZES = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
             num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=POSITIONS,
             bos_token_id=1, eos_token_id=2)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e4, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 32}

CONFIGS = {
    "gpt2": GPT2Config(vocab_size=VOCABULARY, n_positions=POSITIONS, n_embd=24, n_layer=2,
                       n_head=4, bos_token_id=1, eos_token_id=2, attn_pdrop=0, embd_pdrop=0,
                       resid_pdrop=0),
    "llama3": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama3-tied": LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=6),
}


ADAPTED = {"gpt2": ["c_attn", "c_proj", "c_fc"],
           "llama3": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]}


def adapt(model, folder, targets, tokens):
    """Makes an adapter of PEFT, and returns what the adapted model computes."""
    model = get_peft_model(model, LoraConfig(r=3, lora_alpha=6, target_modules=targets,
                                             task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.add_(torch.randn_like(weight) * 0.15)
    model.save_pretrained(folder)
    os.remove(os.path.join(folder, "README.md"))
    model.zero_grad()
    out = model(tokens, labels=tokens)
    out.loss.backward()
    grads = {"grad." + n.replace("base_model.model.", "").replace(".default", ""): p.grad
             for n, p in model.named_parameters() if "lora_" in n}
    return grads | {"adapter.logits": out.logits.detach(), "adapter.loss": out.loss.detach()}


TEXT = """the quick brown fox jumps over the lazy dog, and then it sleeps in the warm sun.
pack my box with five dozen jugs. how vexingly quick are the zebras that jump over the others?
"""


def make_tokenizer(folder):
    """Makes a tokenizer of as many words as the model has: letters, and what follows from TEXT."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(TEXT.splitlines(True), trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)])
    assert tokenizer.get_vocab_size() == VOCABULARY
    tokenizer.save(os.path.join(folder, "tokenizer.json"))


def main():
    directory = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__))
    for name, config in CONFIGS.items():
        torch.manual_seed(len(name))
        config._attn_implementation = "eager"
        model = AutoModelForCausalLM.from_config(config).float().eval()
        with torch.no_grad():  # biases and gains that do something, and logits that differ
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * 0.15)
        folder = os.path.join(directory, name)
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder, max_shard_size="40KB" if name == "qwen3" else "1GB")
        os.remove(os.path.join(folder, "generation_config.json"))
        tokens = torch.randint(0, VOCABULARY, (2, 24))
        out = model(tokens, labels=tokens)
        out.loss.backward()
        expected = {"grad." + n: p.grad for n, p in model.named_parameters()}
        with torch.no_grad():
            row = tokens[:, :8]
            for _ in range(64):
                best = model(row).logits[:, -1].argmax(-1, keepdim=True)
                row = torch.cat([row, best], 1)
        expected |= {"tokens": tokens, "logits": out.logits.detach(), "loss": out.loss.detach(),
                     "greedy": row[:, 8:].contiguous()}
        if name == "llama3":
            make_tokenizer(folder)
        if name in ADAPTED:
            expected |= adapt(model, os.path.join(folder, "adapter"), ADAPTED[name], tokens)
        save_file(expected, os.path.join(folder, "expected.safetensors"))


if __name__ == "__main__":
    main()
