package main

import (
	"encoding/json"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/exampletest"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// TestAnAdapterIsTrainedAsByPEFT: with alpha, targets, a chat template, answers and several runs of
// a step, on two ranks. It needs EURYALE_FULL, and a Python that has torch, transformers and peft.
func TestAnAdapterIsTrainedAsByPEFT(t *testing.T) {
	if os.Getenv("EURYALE_FULL") != "1" ||
		exec.Command("python3", "-c", "import torch, transformers, peft").Run() != nil {
		t.Skip("needs EURYALE_FULL=1, torch, transformers and peft")
	}
	dir := conversing(t)
	at := func(name string) string { return filepath.Join(dir, name) }
	require.NoError(t, os.WriteFile(at("model/chat_template.jinja"), []byte("{% for m in messages "+
		"%}{% if m.role == 'assistant' %}a{% generation %}{{ m.content }}. {% endgeneration %}"+
		"{% else %}u{{ m.content }}. {% endif %}{% endfor %}"), 0o666))
	const flags = " --lora 3 --alpha 7 --targets q_proj,o_proj,down_proj --context 60 --batch 40 " +
		"--accumulate 2 --every 1"
	small := strings.NewReplacer(folder, at("model"), "/text", "/chats.jsonl").Replace(small(dir)) +
		flags + " --eval " + at("held")
	exampletest.Train(t, 2, small+" --steps 1 --lr 1e-30 --out "+at("begin"))
	printed := exampletest.Train(t, 2, small+" --steps 5 --lr 3e-2 --out "+at("end"))
	loss, _, _, _ := ending(t, printed)
	c := exec.Command("python3", "testdata/peft_lora.py", at("model"), at("chats.jsonl"),
		at("begin"), at("end"), "5", "3e-2")
	c.Env = append(os.Environ(), "HF_HUB_OFFLINE=1")
	c.Stderr = os.Stderr
	text := require.Value(c.Output())(t)
	var theirs struct{ Mean, After, Ours, Largest float64 }
	require.NoError(t, json.Unmarshal(text[strings.LastIndexByte(string(text), '{'):], &theirs))
	t.Logf("%s", text)
	require.Check(t, math.Abs(loss-theirs.Mean) < 1e-4 &&
		math.Abs(theirs.Ours-theirs.After) < 1e-5 && theirs.Largest < 1e-5,
		"the mean loss of the steps is %v, PEFT has %+v", loss, theirs)
}
