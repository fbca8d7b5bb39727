"""Trains an adapter by transformers and PEFT as examples/finetune does, and compares.

    python3 peft_lora.py MODEL CHATS BEGIN END STEPS RATE

All conversations are one batch. BEGIN is the adapter before the first step, END what finetune has
made of it in STEPS steps.
"""

import json
import math
import sys

import peft
import torch
import transformers


def main():
    model, chats, begin, end, steps, rate = sys.argv[1:]
    steps, rate = int(steps), float(rate)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    rows = []
    with open(chats, encoding="utf-8") as file:
        for line in file:
            rows.append(tokenizer.apply_chat_template(
                json.loads(line)["messages"], return_dict=True, return_assistant_tokens_mask=True))
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full((len(rows), longest), -100)
    for i, row in enumerate(rows):
        for at, (token, answer) in enumerate(zip(row["input_ids"], row["assistant_masks"])):
            ids[i, at] = token
            if answer:
                labels[i, at] = token

    def adapted(folder):
        base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        return peft.PeftModel.from_pretrained(base, folder, is_trainable=True)

    def loss_of(m):
        return m(input_ids=ids, labels=labels).loss

    m = adapted(begin)
    learnables = [p for p in m.parameters() if p.requires_grad]
    solver = torch.optim.AdamW(learnables, lr=rate, weight_decay=0)
    losses = []
    for step in range(steps):
        cosine = (1 + math.cos(math.pi * step / steps)) / 2
        for group in solver.param_groups:
            group["lr"] = rate / 10 + (rate - rate / 10) * cosine
        solver.zero_grad()
        loss = loss_of(m)
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learnables, 1)
        solver.step()
    with torch.no_grad():
        ours = adapted(end)
        largest = max((a - b).abs().max().item()
                      for a, b in zip(m.parameters(), ours.parameters()))
        print(json.dumps({"mean": sum(losses) / steps, "first": losses[0], "last": losses[-1],
                          "after": loss_of(m).item(), "ours": loss_of(ours).item(),
                          "largest": largest, "targets": int((labels[:, 1:] >= 0).sum())}))


main()
