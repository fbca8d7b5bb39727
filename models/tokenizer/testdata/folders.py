#!/usr/bin/env python3
"""Makes folders of random tokenizers, and what the AutoTokenizer of transformers makes of texts
with them. Needs tokenizers and transformers.

    python3 folders.py FILE NUMBER [SEED [TEXTS]]

FILE is gzipped JSON: a list of folders, each with its files, the ids of texts without and with
special tokens, texts of ids without and with special tokens, and the ids of BOS and EOS, or with
the error of transformers. The first ones are by hand, the others random. folders.json.gz is
"folders.json.gz 24 1 2".
"""
import base64
import gzip
import json
import os
import random
import sys
import tempfile
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.filterwarnings("ignore")
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

import make

transformers.logging.set_verbosity(50)
WORDS = 60  # that are learnt
TOKENS = ["<s>", "</s>", "<unk>", "<pad>", "<|endoftext|>", "<|im_end|>", "[INST]", "<word>", "the",
          "New  York", "e\u0301", " x ", " ", "\n", "  ", "Qq", "in", "<0x41>"]
NAMED = ["bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"]
FLAGS = ["single_word", "lstrip", "rstrip", "normalized", "special"]


PLAIN = dict.fromkeys(FLAGS, False)
SPACES = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
DIGITS = {"type": "Split", "pattern": {"Regex": r"\p{N}"}, "behavior": "Isolated", "invert": False}
LLAMA2 = {"type": "Sequence", "normalizers": [
    {"type": "Prepend", "prepend": "▁"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]}
PADDING = {"strategy": "BatchLongest", "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0,
           "pad_type_id": 0, "pad_token": "in"}
# Texts, and keys of tokenizer.json, of its model, and of other files.
BY_HAND = [
    (["in the inn", "in"], {"padding": PADDING}, {}, {}, {}),
    (["in the inn"], {"padding": PADDING}, {}, {"pad_token": None}, {}),
    (["in the inn"], {"padding": PADDING}, {}, {"tokenizer_class": "LlamaTokenizer"}, {}),
    (["a <t> b<t>"], {"normalizer": LLAMA2, "pre_tokenizer": None, "added_tokens": [
        PLAIN | {"id": 389, "content": "<t>", "special": True, "normalized": True}]}, {}, {}, {}),
    (["a the<s> b"], {}, {}, {"bos_token": "the", "tokenizer_class": "LlamaTokenizerFast"}, {}),
    (["a the b"], {}, {}, {"image_token": "the"}, {}),
    (["a <t> b"], {"added_tokens": [PLAIN | {"id": 389, "content": "<t>"}]}, {},
     {"eos_token": "<t>"}, {}),
    (["a <t> b"], {"added_tokens": [PLAIN | {"id": 389, "content": "<t>"}]}, {},
     {"eos_token": "<t>", "added_tokens_decoder": {}}, {}),
    (["a <t> b"], {"added_tokens": [PLAIN | {"id": 389, "content": "<t>"}]}, {},
     {"eos_token": "<t>", "added_tokens_decoder": {"389": PLAIN | {"content": "<t>"}}}, {}),
    (["a <t> b"], {"added_tokens": [PLAIN | {"id": 389, "content": "<t>"}]}, {},
     {"image_token": "<t>"}, {}),
    (["a  the  b"], {}, {}, {"bos_token": "the", "eos_token": PLAIN | {
        "__type": "AddedToken", "content": "the", "lstrip": True}}, {}),
    (["a <t> b"], {"added_tokens": [PLAIN | {"id": 389, "content": "<t>"}]}, {},
     {"extra_special_tokens": ["<t>", "</s>", "<u>"], "additional_special_tokens": ["<v>"]}, {}),
    ([" a <s> b", "</s>a"], {"normalizer": LLAMA2, "pre_tokenizer": None}, {},
     {"tokenizer_class": "LlamaTokenizer"}, {"model_type": "llama"}),
    ([" a <s> b", "</s>a"], {}, {}, {"tokenizer_class": "LlamaTokenizer", "legacy": True}, {}),
    ([" a <s> b", "</s>a"], {}, {}, {"tokenizer_class": "LlamaTokenizer", "legacy": None}, {}),
    ([" a <s> b", "</s>a"], {}, {}, {"tokenizer_class": "LlamaTokenizer",
                                      "add_prefix_space": False, "legacy": True}, {}),
    ([" a <s> b"], {"normalizer": LLAMA2, "pre_tokenizer": None}, {},
     {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}, {"model_type": "mistral"}),
    (["a  ", " "], {"added_tokens": [PLAIN | {"id": 389, "content": " ", "lstrip": True,
                                              "rstrip": True}]}, {}, {}, {}),
    (["a  ", " "], {"added_tokens": [PLAIN | {"id": 389, "content": " ", "rstrip": True}]}, {}, {},
     {}),
    (["<t>   ", "<t> a"], {"added_tokens": [PLAIN | {"id": 389, "content": "<t>", "rstrip": True},
                                            PLAIN | {"id": 390, "content": " "}]}, {}, {}, {}),
    (["<t>     ", "<t> a"], {"added_tokens": [PLAIN | {"id": 389, "content": "<t>", "rstrip": True},
                                              PLAIN | {"id": 390, "content": "  "}]}, {}, {}, {}),
    (["a the b"], {}, {}, {"additional_special_tokens": []}, {},
     {"additional_special_tokens": ["the"]}),
    (["a the b"], {}, {}, {}, {}, {"additional_special_tokens": ["the"]}),
    (["a\n\t語\nb", "語\n"], {}, {"without": ["<0x0A>"]}, {}, {}),
    (["a\n\t語\nb\n\n"], {}, {"without": ["<0x0A>"], "fuse_unk": False}, {}, {}),
    (["a1b", "1"], {"normalizer": LLAMA2, "pre_tokenizer": {
        "type": "Sequence", "pretokenizers": [DIGITS, SPACES]}}, {}, {}, {}),
    (["a1b", "1"], {"pre_tokenizer": {
        "type": "Sequence", "pretokenizers": [DIGITS, SPACES]}}, {}, {}, {}),
]


def chance(r, p):
    return r.random() < p


def learnt(t, **options):
    t.train_from_iterator(make.corpus(), trainers.BpeTrainer(show_progress=False, **options))
    model = json.loads(t.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), model["merges"]


def bases():
    """The words and merges of a model on bytes, and of one on letters."""
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    on_bytes = learnt(t, vocab_size=256 + WORDS,
                      initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.Metaspace()
    words, merges = learnt(t, vocab_size=70 + WORDS, limit_alphabet=70)
    return on_bytes, (["<unk>", "<s>", "</s>"] + make.BYTES + words, merges)


def token(r, content, id=None):
    flags = {f: chance(r, 0.3) for f in FLAGS}
    if chance(r, 0.5):
        flags = dict.fromkeys(FLAGS, False) | {"special": True}
    return ({} if id is None else {"id": id}) | {"content": content} | flags


def model(r, words, merges, letters):
    m = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
         "end_of_word_suffix": None, "fuse_unk": letters, "byte_fallback": letters,
         "ignore_merges": chance(r, 0.2)}
    if letters and chance(r, 0.7):
        m["unk_token"] = "<unk>"
    for key, values in {"dropout": [0.0, 0.1], "unk_token": ["the", "nowhere"],
                        "fuse_unk": [True, False],
                        "byte_fallback": [True, False], "continuing_subword_prefix": ["", "##"],
                        "end_of_word_suffix": ["", "</w>"], "type": [None], "new": [1, None]}.items():
        if chance(r, 0.02):
            m[key] = r.choice(values)
    if m["type"] is None:
        del m["type"]
    if chance(r, 0.1):  # some words are not there
        gone = set(r.sample(words, 3)) - {"<unk>"}
        words = [w for w in words if w not in gone]
        merges = [p for p in merges if not gone & {p[0], p[1], p[0] + p[1]}]
    m["vocab"] = {w: i for i, w in enumerate(words)}
    m["merges"] = [" ".join(p) for p in merges] if chance(r, 0.2) else merges
    if chance(r, 0.02):
        m = r.choice([{"type": "WordPiece", "unk_token": "<unk>", "continuing_subword_prefix": "##",
                       "max_input_chars_per_word": 100, "vocab": m["vocab"] | {"<unk>": 9999}},
                      {"type": "WordLevel", "unk_token": "the", "vocab": m["vocab"]},
                      {"type": "Unigram", "unk_id": 0, "byte_fallback": False,
                       "vocab": [[w, -float(i)] for i, w in enumerate(words)]}])
    return m


def sequence(key, steps):
    return {"type": "Sequence", key: steps}


def normalizer(r):
    known = lambda: r.choice([
        {"type": "NFC"}, {"type": "NFC"}, {"type": "Prepend", "prepend": r.choice(["▁", "_x"])},
        {"type": "Replace", "pattern": {"String": r.choice([" ", "e", "ab"])},
         "content": r.choice(["▁", "", "yy"])},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        {"type": "Sequence", "normalizers": []}])
    other = lambda: r.choice([
        {"type": "Replace", "pattern": {"Regex": r.choice([" +", "e"])}, "content": "▁"},
        {"type": "Lowercase"}, {"type": "NFKC"}, {"type": "NFD"}, {"type": "StripAccents"},
        {"type": "Strip", "strip_left": True, "strip_right": chance(r, 0.5)}])
    one = lambda: other() if chance(r, 0.05) else known()
    return r.choice([None, one(), one(), sequence("normalizers", [one(), one()])])


def split(r):
    pattern = r.choice([make.GPT2, make.LLAMA3, make.QWEN2, make.TEKKEN, r"\p{N}", r"\s+"])
    s = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    if chance(r, 0.02):
        s["invert"] = True
    if chance(r, 0.02):
        s["behavior"] = r.choice(["Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"])
    if chance(r, 0.02):
        s["pattern"] = {"String": "e"}
    return s


def on_bytes(r, key):
    return {"type": "ByteLevel", "add_prefix_space": chance(r, 0.1), "trim_offsets": chance(r, 0.5),
            "use_regex": chance(r, 0.5)}


def metaspace(r):
    return {"type": "Metaspace", "replacement": r.choice(["▁", "▁", "▁", "_"]),
            "prepend_scheme": r.choice(["always", "first", "never"]), "split": chance(r, 0.03)}


def pre_tokenizer(r, letters):
    if chance(r, 0.03):
        return r.choice([{"type": "Whitespace"}, {"type": "Digits", "individual_digits": True},
                         {"type": "BertPreTokenizer"}, None, {"type": "WhitespaceSplit"},
                         {"type": "Punctuation", "behavior": "Isolated"}])
    if letters:
        return r.choice([None, metaspace(r), metaspace(r),
                         sequence("pretokenizers", [split(r), metaspace(r)])])
    return r.choice([on_bytes(r, ""), sequence("pretokenizers", [split(r), on_bytes(r, "")])])


def decoder(r, letters):
    strip = {"type": "Strip", "content": " ", "start": r.choice([1, 1, 1, 0, 2]), "stop": 0}
    llama = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
             {"type": "ByteFallback"}, {"type": "Fuse"}] + [strip][:r.choice([0, 1, 1])]
    if chance(r, 0.03):
        return r.choice([None, {"type": "WordPiece", "prefix": "##", "cleanup": True},
                         {"type": "BPEDecoder", "suffix": "</w>"}, {"type": "Fuse"},
                         metaspace(r), sequence("decoders", [strip, {"type": "Fuse"}]),
                         {"type": "ByteFallback"}, sequence("decoders", llama[::-1])])
    return sequence("decoders", llama) if letters else on_bytes(r, "")


def template(r, ids):
    names = r.sample(sorted(ids), min(len(ids), 3)) if ids else []
    special = {n: {"id": n, "ids": [ids[n]], "tokens": [n]} for n in names}
    for n in names:
        if chance(r, 0.1):
            special[n] = {"id": n, "ids": [ids[n], 5], "tokens": [n, n]}
    kind = lambda: r.choice([0, 0, 1])
    one = lambda: [{"SpecialToken": {"id": r.choice(names), "type_id": kind()}}
                   for _ in range(r.choice([0, 1, 1, 2]))] if names else []
    text = lambda of: [{"Sequence": {"id": of, "type_id": kind()}}]
    t = {"type": "TemplateProcessing", "single": one() + text("A") + one(),
         "pair": one() + text("A") + one() + text("B") + one(), "special_tokens": special}
    if chance(r, 0.04):
        t["pair"] = r.choice([[], text("B"), t["single"]])
    if chance(r, 0.03):
        t["single"] = r.choice([[], text("B"), text("A") + text("A")])
    if chance(r, 0.03) and special:
        special[names[0]] = special[names[0]] | {"ids": []}
    if chance(r, 0.03) and special:
        del special[names[0]]
    return t


def post_processor(r, ids):
    pair = lambda: [r.choice(sorted(ids)), r.choice([0, 5])] if ids else ["the", 5]
    one = lambda: r.choice([on_bytes(r, ""), template(r, ids), template(r, ids)])
    if chance(r, 0.03):
        return r.choice([{"type": "BertProcessing", "sep": pair(), "cls": pair()},
                         {"type": "RobertaProcessing", "sep": pair(), "cls": pair(),
                          "trim_offsets": True, "add_prefix_space": chance(r, 0.5)}])
    return r.choice([None, one(), one(), sequence("processors", [on_bytes(r, ""), template(r, ids)]),
                     sequence("processors", [one(), one() if chance(r, 0.2) else on_bytes(r, "")])])


def objects(value):
    """All objects inside a value."""
    if isinstance(value, dict):
        yield value
        for key, v in value.items():
            if key != "vocab":
                yield from objects(v)
    elif isinstance(value, list):
        for v in value:
            yield from objects(v)


def tokenizer(r, base, letters):
    words, merges = base
    f = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": []}
    m = model(r, words, merges, letters)
    vocab = m["vocab"]
    if isinstance(vocab, list):
        vocab = {w: i for i, (w, _) in enumerate(vocab)}
    size = len(vocab)
    for content in r.sample(TOKENS, r.choice([0, 1, 2, 3, 5])):
        id = vocab.get(content, size)
        size += id == size
        f["added_tokens"].append(token(r, content, id))
    f["added_tokens"].sort(key=lambda t: t["id"])
    ids = {t["content"]: t["id"] for t in f["added_tokens"]}
    if chance(r, 0.2):
        f["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst",
                           "stride": 0}
    if chance(r, 0.2):
        f["padding"] = {"strategy": {"Fixed": 40}, "direction": "Left", "pad_to_multiple_of": None,
                        "pad_id": 0, "pad_type_id": 0, "pad_token": "the"}
    f["normalizer"] = normalizer(r) if chance(r, 0.6) else None
    if letters and chance(r, 0.4):
        f["normalizer"] = sequence("normalizers", [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}])
        f["pre_tokenizer"] = None
    else:
        f["pre_tokenizer"] = pre_tokenizer(r, letters)
    f["post_processor"] = post_processor(r, ids)
    f["decoder"] = decoder(r, letters)
    f["model"] = m
    return f


def added(f):
    tokens = f.get("added_tokens")
    return [t for t in tokens if isinstance(t, dict)] if isinstance(tokens, list) else []


def spoilt(r, f):
    """Other keys and values somewhere in a file."""
    while chance(r, 0.12):
        inside = r.choice(list(objects(f)))
        key = r.choice(["new", "Type", "ID", "id", "split"] + sorted(inside) * 2)
        inside[key] = r.choice([0, 1, True, False, None, "x", "", "the", " ", "▁", [], {}])
        if chance(r, 0.2):
            del inside[key]


def named(r, content):
    if chance(r, 0.6):
        return content
    return token(r, content) | {"__type": "AddedToken"}


def settings(r, f):
    """tokenizer_config.json and special_tokens_map.json."""
    has = [t["content"] for t in f["added_tokens"]] or ["the"]
    some = lambda: r.choice(has) if chance(r, 0.8) else r.choice(TOKENS)
    c, s = {}, None
    values = {
        "legacy": [True, False, None], "add_bos_token": [True, False], "add_eos_token": [True, False],
        "add_prefix_space": [True, False, None], "clean_up_tokenization_spaces": [True, False],
        "split_special_tokens": [False], "model_max_length": [7, 1e30], "padding_side": ["left"],
        "truncation_side": ["left"], "chat_template": ["{{ x }}"], "use_default_system_prompt": [False],
        "sp_model_kwargs": [{}, {"nbest_size": 1}], "errors": ["replace"], "processor_class": ["X"],
        "spaces_between_special_tokens": [True, False], "name_or_path": ["x/y"],
        "special_tokens_map_file": [None, "/x"], "tokenizer_file": ["/x"], "backend": ["tokenizers"],
        "is_local": [True], "local_files_only": [False], "max_length": [3], "stride": [2],
        "pad_to_multiple_of": [8], "pad_token_type_id": [1], "truncation_strategy": ["longest_first"],
        "model_input_names": [["input_ids"]], "new": [False, None], "do_lower_case": [False],
        "added_tokens_decoder": [0], "extra_special_tokens": [0], "additional_special_tokens": [0],
        "image_token": [0], "model_specific_special_tokens": [0], "init_inputs": [[]], "from_slow": [True],
        "response_schema": [{}], "trust_remote_code": [False], "verbose": [True]}
    if chance(r, 0.05):
        c |= r.choice([{"fix_mistral_regex": True}, {"auto_map": {"AutoTokenizer": ["x.Y", None]}},
                       {"new": 1}, {"split_special_tokens": True}, {"do_lower_case": True}, {"unk_id": 3}, {
            "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True}])
    for key in r.sample(sorted(values), r.choice([0, 1, 2, 4])):
        c[key] = r.choice(values[key])
        if key == "added_tokens_decoder":
            c[key] = {str(t["id"]): {k: v for k, v in t.items() if k != "id"}
                      for t in f["added_tokens"] if chance(r, 0.95)}
            if chance(r, 0.1) and c[key]:
                t = r.choice(list(c[key].values()))
                t[r.choice(FLAGS)] = True
        elif key in ("extra_special_tokens", "model_specific_special_tokens"):
            c[key] = {"image_token": named(r, some())}
            if key[0] == "e" and chance(r, 0.6):
                c[key] = [named(r, some()) for _ in range(r.choice([0, 1, 2]))]
        elif key == "additional_special_tokens":
            c[key] = [named(r, some()) for _ in range(r.choice([0, 1, 2]))]
        elif key == "image_token":
            c[key] = named(r, some())
    for key in NAMED:
        if chance(r, 0.25):
            c[key] = None if chance(r, 0.1) else named(r, some())
    if chance(r, 0.15):
        s = {key: some() if chance(r, 0.6) else token(r, some())
             for key in r.sample(NAMED, r.choice([0, 1, 2]))}
        if chance(r, 0.3):
            s["additional_special_tokens"] = [some()]
        if chance(r, 0.05):
            s["add_prefix_space"] = True
    return c, s


def folder(r, both):
    letters = chance(r, 0.5)
    f = tokenizer(r, both[letters], letters)
    files = {"tokenizer.json": f}
    c, s = settings(r, f)
    for file in (f, c, s or {}):
        spoilt(r, file)
    kinds = ["LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend"]
    if not letters:
        kinds = ["GPT2Tokenizer", "GPT2TokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast",
                 "LlamaTokenizerFast", "PreTrainedTokenizerFast"]
    if chance(r, 0.05):
        kinds = ["MyTokenizer", "CodeLlamaTokenizer", "PreTrainedTokenizer", "RobertaTokenizer",
                 "BertTokenizer", "GPT2Tokenizer", "LlamaTokenizer", ""]
    if chance(r, 0.7):
        c["tokenizer_class"] = r.choice(kinds)
    if chance(r, 0.85):
        files["tokenizer_config.json"] = c
    if s is not None:
        files["special_tokens_map.json"] = s
    if chance(r, 0.05):
        files["added_tokens.json"] = {str(t.get("content")): t.get("id") for t in added(f)}
    if chance(r, 0.7):
        types = ["llama", "mistral"] if letters else ["llama", "mistral", "gpt2", "qwen2", "qwen3"]
        config = {"model_type": r.choice(types)}
        if chance(r, 0.1):
            config["tokenizer_class"] = r.choice(kinds)
        if chance(r, 0.03):
            config["model_type"] = r.choice(["phi3", "gemma", "qwen2", "gpt2", "mixtral"])
        files["config.json"] = config
    return files


def by_hand(base, file, model, config, of, older=None):
    words, merges = base
    gone = model.get("without", [])
    f = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
         "normalizer": None, "pre_tokenizer": SPACES, "post_processor": None,
         "decoder": {"type": "Sequence", "decoders": [
             {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
             {"type": "ByteFallback"}, {"type": "Fuse"},
             {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
         "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>",
                   "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": True,
                   "byte_fallback": True, "ignore_merges": False, "merges": merges,
                   "vocab": {w: i for i, w in enumerate(w for w in words if w not in gone)}}} | file
    f["model"] |= {key: value for key, value in model.items() if key != "without"}
    return {"tokenizer.json": f, "tokenizer_config.json": config, "config.json": of} | (
        {"special_tokens_map.json": older} if older else {})


def text(r, has):
    words = " ".join(make.SENTENCES.split("\n")).split(" ")
    pieces = [" ", "  ", "\n", "\t", "'s", ".", "1", "23", "\u00a0", "▁", "_", "e", "ab", "E\u0301"]
    return "".join(r.choice([r.choice(pieces), r.choice(words), r.choice(has + TOKENS),
                             make.character(r, r.choice(make.RANGES))])
                   for _ in range(r.choice([0, 1, 2, 3, 5, 8])))


def expected(r, files, texts):
    with tempfile.TemporaryDirectory() as directory:
        for name, content in files.items():
            with open(os.path.join(directory, name), "w") as f:
                json.dump(content, f)
        try:
            t = AutoTokenizer.from_pretrained(directory)
            special = [t.encode(x) for x in texts]
            random_ids = [[r.randrange(len(t) + 2) for _ in range(r.choice([1, 2, 5, 9]))]
                          for _ in texts]
            return {"class": type(t).__name__,
                    "plain": [t.encode(x, add_special_tokens=False) for x in texts],
                    "special": special, "bos": t.bos_token_id, "eos": t.eos_token_id,
                    "decoded": [[ids, t.decode(ids, skip_special_tokens=True), t.decode(ids)]
                                for ids in special + random_ids]}
        except BaseException as e:  # whatever it refuses, and panics of its library
            if isinstance(e, KeyboardInterrupt):
                raise
            return {"error": f"{type(e).__name__}: {e}"[:200]}


def main():
    both = bases()
    out = []
    for texts, *how in BY_HAND:
        files = by_hand(both[True], *how)
        out.append({"files": files, "texts": texts} | expected(random.Random(1), files, texts))
    seed, length = (int(x) for x in (sys.argv[3:] + ["1", "10"][len(sys.argv) - 3:])[:2])
    for i in range(int(sys.argv[2])):
        r = random.Random(seed * 1_000_003 + i)
        files = folder(r, both)
        has = [t["content"] for t in added(files["tokenizer.json"])
               if isinstance(t.get("content"), str)]
        texts = [text(r, has) for _ in range(length)]
        out.append({"files": files, "texts": texts} | expected(r, files, texts))
    with open(sys.argv[1], "wb") as f:
        packed = json.dumps(out, separators=(",", ":"), ensure_ascii=False)
        f.write(gzip.compress(packed.encode(), mtime=0))


if __name__ == "__main__":
    main()
