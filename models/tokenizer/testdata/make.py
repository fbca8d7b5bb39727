#!/usr/bin/env python3
"""Makes the files of this directory: small tokenizers in the styles of published models, trained on
sentences below and on licences that Python and Debian ship, and what Hugging Face's tokenizers
makes of 1,000 texts. Needs the package tokenizers.

    python3 make.py [DIRECTORY]

Each folder has a tokenizer.json. cases.json.gz holds the texts, as base64 of their bytes, and for each
tokenizer the ids of each text without and with special tokens, and lists of random ids with the
texts that they decode to, without and with special tokens. Bytes that are not UTF-8 are U+FFFD to
Hugging Face, one each, as a range over a Go string has them.
"""
import base64
import codecs
import gzip
import json
import os
import random
import sys
import unicodedata

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

SENTENCES = """
The quick brown fox jumps over the lazy dog. I'll say we've seen it, they're late, and you'd know.
Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Voix ambiguë d'un cœur au zéphyr.
El pingüino Wenceslao hizo kilómetros bajo exhaustiva lluvia. Příliš žluťoučký kůň úpěl ďábelské ódy.
Съешь же ещё этих мягких французских булок, да выпей чаю. Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.
نص حكيم له سر قاطع وذو شأن عظيم. דג סקרן שט בים מאוכזב ולפתע מצא חברה.
ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश करने वाले विष्णुवतार भगवान श्रीराम।
เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์เดรัจฉาน. 天地玄黃 宇宙洪荒 日月盈昃 辰宿列張.
いろはにほへと ちりぬるを わかよたれそ つねならむ. 다람쥐 헌 쳇바퀴에 타고파. Đồng bằng sông Cửu Long.
func main() {\n\tfor i := 0; i < 10; i++ {\n\t\tfmt.Println("x =", i*2)\n\t}\n}
def f(x):\n    return [y ** 2 for y in range(x) if y % 3 == 0]  # 12345 and 67,890.12
😀 😃 👍🏽 👩‍👩‍👧 🇩🇪 ❤️ café cafe\u0301 Å A\u030a
"""

GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
LLAMA3 = (r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"""
          r""" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""")
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"""
          r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"""
          r""" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+""")
VOCABULARY = 640
BYTES = [f"<0x{b:02X}>" for b in range(256)]


def corpus():
    lines = SENTENCES.split("\n") * 30
    for path in ("/usr/share/common-licenses/GPL-3", "/usr/share/common-licenses/Apache-2.0",
                 os.path.join(os.path.dirname(json.__file__), "decoder.py")):
        if os.path.exists(path):
            with open(path, encoding="utf-8") as f:
                lines += f.read().split("\n")
    return lines


def special(text, **how):
    return AddedToken(text, special=True, normalized=False, **how)


def splitting(pattern):
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def byte_level(pre, normalizer=None, added=(), post=None, ignore_merges=False):
    t = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    t.pre_tokenizer, t.decoder = pre, decoders.ByteLevel()
    if normalizer:
        t.normalizer = normalizer
    t.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=VOCABULARY, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    for token in added:
        t.add_tokens([token])
    t.post_processor = post(t) if post else processors.ByteLevel(trim_offsets=False)
    return t


def begins(token):
    """The template that begins texts by a token."""
    def template(t):
        return processors.TemplateProcessing(
            single=f"{token} $A", pair=f"{token} $A {token} $B:1",
            special_tokens=[(token, t.token_to_id(token))])
    return template


def llama2_model(metaspace):
    """A BPE model with the tokens that SentencePiece gives it: <unk>, <s>, </s>, bytes, words."""
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = metaspace
    t.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=VOCABULARY - 259, show_progress=False, limit_alphabet=90))
    model = json.loads(t.to_str())["model"]
    words = sorted(model["vocab"], key=model["vocab"].get)
    runs = ["▁▁", "▁▁▁▁"]
    words = ["<unk>", "<s>", "</s>"] + BYTES + words + [w for w in runs if w not in words]
    merges = [tuple(m) for m in model["merges"]] + [("▁", "▁"), ("▁▁", "▁▁")]
    return models.BPE({w: i for i, w in enumerate(words)}, list(dict.fromkeys(merges)),
                      unk_token="<unk>", fuse_unk=True, byte_fallback=True)


def llama2(new):
    """Llama 2 as transformers wrote it until 2024, and Mistral as it writes it since."""
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    t = Tokenizer(llama2_model(pre_tokenizers.Metaspace()))
    if new:
        t.pre_tokenizer = metaspace
    else:
        t.normalizer = normalizers.Sequence([
            normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                   decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    t.add_special_tokens([special("<unk>"), special("<s>"), special("</s>")])
    if new:
        t.add_special_tokens([special("[INST]"), special("[/INST]", rstrip=True)])
    else:
        t.add_tokens([AddedToken("<word>", single_word=True, normalized=True),
                      AddedToken("New  York", lstrip=True, normalized=True)])
    t.post_processor = begins("<s>")(t)
    return t


def unigram():
    t = Tokenizer(models.Unigram())
    t.pre_tokenizer, t.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    t.train_from_iterator(corpus(), trainers.UnigramTrainer(
        vocab_size=VOCABULARY, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"],
        unk_token="<unk>"))
    t.post_processor = begins("<s>")(t)
    return t


def tokenizers_of_models():
    gpt2 = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False),
                      added=[AddedToken("<|endoftext|>", special=True, normalized=True)])
    begin = "<|begin_of_text|>"
    llama3 = byte_level(
        splitting(LLAMA3), ignore_merges=True,
        added=[special(x) for x in (begin, "<|end_of_text|>", "<|eot_id|>", "<|eot_id|>\n")],
        post=lambda t: processors.Sequence([processors.ByteLevel(trim_offsets=False),
                                            begins(begin)(t)]))
    qwen = byte_level(
        splitting(QWEN2), normalizer=normalizers.NFC(),
        added=[special("<|endoftext|>"), special("<|im_start|>"), special("<|im_end|>"),
               AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    tekken = byte_level(splitting(TEKKEN), ignore_merges=True,
                        added=[special("<s>"), special("</s>"), special("[INST]")],
                        post=begins("<s>"))
    return {"gpt2": gpt2, "llama3": llama3, "qwen2": qwen, "tekken": tekken,
            "llama2": llama2(False), "mistral": llama2(True)}


FIXED = [
    "", " ", "  ", "\n", "\r\n", "\n\n\n", "\t", " \n ", "   \n\n  x", "a", " a", "a ", "  a  b   c",
    "Hello, world!", "it's IT'S we'LL I'm y'all 'S 's 'ſ don'T", "'", "''s", "\u017f'\u017f",
    "x = 1234567890; y=12 345 6", "1" * 40, "١٢٣٤ ①② Ⅻ ½ 1٢a", "naïve cafe\u0301 e\u0301\u0302",
    "\u1100\u1161\u11a8 각", "A\u030a \u212b \u2126 \ufb01", "a\u0327\u0301 a\u0301\u0327",
    "q" + "\u0323\u0307" * 20, "e" + "\u0301" * 60 + "x", "\u0301 lone", "क्षि ก็ 👩‍👩‍👧‍👦 🇺🇳 👍🏿 ☃️",
    "\x00\x01\x7f\x80\x9f", "a\u0085b\u00a0c\u2003d\u3000e\u200bf\u2028g\ufeffh", "\u180e \u1680",
    "<|endoftext|>", "a<|endoftext|>b", "<|endoftext|><|endoftext|>", "<|endoftext", "<|eot_id|>\n",
    "<|eot_id|>\r", "<|begin_of_text|>hi <|eot_id|> there", "<|im_start|>user\nhi<|im_end|>\n",
    "<think>\nso </think>ok", "<s>a</s>", "<s> a </s> b", " <s>", "<unk>", "x <unk> y", "[INST] hi",
    "[INST]hi[/INST]  there [/INST]", "<word>", "a<word>", " <word> <word>b", "New  York",
    "in   New  York now", "New York", "▁", "▁▁", " ▁a", "a▁b", "<0x41>", "<0x0A>b", "ĠaĊ", "Ā",
    "日本語テキスト、混在 text", "한국어와 English", "ДОБРЫЙ день", "مرحبا بالعالم", "שלום", "ไทย",
    "\U0001d54f \U0001f600\U0001f3ff \U00020000 \U0010ffff", "\ue000\ufffd\ufffe", "ABCdef GHi ǅx",
    "https://example.com/a_b?c=d&e=%20#f", "snake_case camelCase SCREAMING_CASE kebab-case",
    "if (a[i] != b->c) { return !x; } // done\n\n\n", "\tfor\t\tx", "/* */ */\r\n\r\n/\n//",
    "a" * 3000, " " * 500, "ab " * 500, "\n" * 300, "e\u0301" * 400, "語" * 500, "\u0301" * 100,
    "🙂" * 200, "0123456789" * 60, "x\u0300y" * 90,
]
INVALID = [b"\xff", b"a\xc3", b"\xe4\xb8", b"\xe4\xb8x", b"\xf0\x9f\x98 \xf0\x9f", b"\xc0\x80",
           b"\xed\xa0\x80", b"ok\x80\x80 \xfe", b"\xf4\x90\x80\x80", b"\xe2\x82\xac\xe2\x82"]
RANGES = [(0x20, 0x7E), (0, 0x1F), (0xA0, 0x17F), (0x300, 0x36F), (0x370, 0x52F), (0x590, 0x6FF),
          (0x900, 0xDFF), (0xE00, 0xEFF), (0x1100, 0x11FF), (0x2000, 0x206F), (0x2150, 0x218F),
          (0x3000, 0x30FF), (0x4E00, 0x4F00), (0xAC00, 0xAD00), (0x1F300, 0x1F64F),
          (0x1D400, 0x1D7FF), (0x1E900, 0x1E95F), (0xFE00, 0xFFEF)]


def character(r, span):
    """A character of a range that is old enough for every table of Unicode in use."""
    while True:
        c = chr(r.randint(*span))
        if unicodedata.ucd_3_2_0.category(c) != "Cn" or span[0] >= 0x1E900:
            if unicodedata.category(c) not in ("Cn", "Cs"):
                return c


def texts():
    r = random.Random(1)
    words = " ".join(SENTENCES.split("\n")).split(" ")
    pieces = [" ", "  ", "\n", "\t", "\r\n", "'s", "'LL", ".", "...", "!?", "</s>", "<|eot_id|>",
              "<think>", "(", "_", "1", "23", "456", "\u00a0", "<word>", "New  York", "▁", "[/INST]"]
    out = [s.encode() for s in FIXED] + INVALID
    while len(out) < 1000:
        kind, n = r.randrange(5), r.choice([1, 2, 3, 5, 8, 13])
        if kind == 0:
            text = " ".join(r.choice(words) for _ in range(n))
        elif kind == 1:
            text = "".join(r.choice(pieces + words[:60]) for _ in range(n))
        elif kind == 2:
            span = r.choice(RANGES)
            text = "".join(character(r, span) for _ in range(n))
        elif kind == 3:
            text = "".join(character(r, r.choice(RANGES)) for _ in range(n))
        else:
            text = "".join(r.choice([r.choice(pieces), r.choice(words),
                                     character(r, r.choice(RANGES))]) for _ in range(n))
        out.append(text.encode())
        if kind == 4 and r.randrange(8) == 0:
            out[-1] = out[-1][:-1] + bytes([r.randrange(256)])
    return out


def decoded(t, seed):
    r = random.Random(seed)
    size = t.get_vocab_size()
    out = []
    for _ in range(150):
        span = (0, 262) if r.randrange(3) == 0 else (0, size - 1)
        ids = [r.randint(*span) for _ in range(r.choice([0, 1, 2, 3, 5, 9]))]
        out.append([ids, t.decode(ids, skip_special_tokens=True),
                    t.decode(ids, skip_special_tokens=False)])
    return out


def main():
    directory = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__))
    codecs.register_error("each", lambda e: ("\ufffd" * (e.end - e.start), e.end))
    inputs = texts()
    cases = {"texts": [base64.b64encode(x).decode() for x in inputs], "tokenizers": {}}
    for name, t in tokenizers_of_models().items():
        path = os.path.join(directory, name, "tokenizer.json")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        t.save(path, pretty=False)
        t = Tokenizer.from_file(path)
        strings = [x.decode("utf-8", "each") for x in inputs]
        cases["tokenizers"][name] = {
            "plain": [t.encode(s, add_special_tokens=False).ids for s in strings],
            "special": [t.encode(s).ids for s in strings],
            "decoded": decoded(t, name)}
    with open(os.path.join(directory, "cases.json.gz"), "wb") as f:
        f.write(gzip.compress(json.dumps(cases, separators=(",", ":")).encode(), mtime=0))


if __name__ == "__main__":
    main()
