package models

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/safetensors"
	"github.com/euryale-ml/euryale/layers"
)

// LoRA adds to linear layers y = x w the product of two narrow matrices, y + (Alpha/Rank) (x A) B.
// A and B are learnables; the weights of the model are not.
//
// Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021. PEFT reads and
// writes the same files.
type LoRA struct {
	Rank  int     // the columns of A, and rows of B
	Alpha float64 // 0 means Rank, so that the product is not scaled
	// Targets are the last parts of names of linear layers, such as "q_proj"; nil means c_attn in
	// GPT-2, and q_proj and v_proj in the Llama family, as in PEFT.
	Targets []string
}

const (
	adapterConfigName = "adapter_config.json"
	adapterName       = "adapter_model.safetensors"
	// adapterPrefix begins the names of PEFT's tensors.
	adapterPrefix = "base_model.model."
	loraA, loraB  = ".lora_A", ".lora_B"
)

// linears returns the last parts of the names of linear layers, and of those that PEFT adapts by
// default.
func (m *Model) linears() (all, adapted []string) {
	if m.Type == gpt2 {
		return []string{"c_attn", "c_proj", "c_fc"}, []string{"c_attn"}
	}
	return []string{"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
		[]string{"q_proj", "v_proj"}
}

// Adapt gives all graphs built from now on an adapter, which has no effect at first: A is drawn,
// and B is zero. A and B are the only learnables of these graphs.
//
// Errors: [backend.ErrArgument] for a rank below 1, an alpha that is not a number, layers that the
// model lacks, and after Logits, whose graph would have no adapter.
func (m *Model) Adapt(l LoRA) error {
	if m.built {
		return fmt.Errorf("models: LoRA: %w: Logits has built a graph without this adapter: call "+
			"Adapt or LoadAdapter before Logits", backend.ErrArgument)
	}
	all, adapted := m.linears()
	if l.Targets == nil {
		l.Targets = adapted
	}
	l.Alpha = cmp.Or(l.Alpha, float64(l.Rank))
	for _, name := range l.Targets {
		if !slices.Contains(all, name) {
			return fmt.Errorf("models: LoRA: %w: %s has no layers %q: use some of %s",
				backend.ErrArgument, m.Type, name, strings.Join(all, ", "))
		}
	}
	if l.Rank < 1 || len(l.Targets) == 0 || math.IsNaN(l.Alpha) || math.IsInf(l.Alpha, 0) {
		return fmt.Errorf("models: LoRA: %w: rank %d, alpha %v, %d layers", backend.ErrArgument,
			l.Rank, l.Alpha, len(l.Targets))
	}
	m.lora, m.adapter = &l, nil
	return nil
}

// LoadAdapter is Adapt with the adapter of a PEFT folder: its adapter_config.json and
// adapter_model.safetensors.
//
// Errors: those of Adapt; [backend.ErrUnsupported] for another kind of adapter; a damaged file;
// those of the file system. Shapes are checked when a graph is built. The files are closed.
func (m *Model) LoadAdapter(dir string) (err error) {
	defer named(&err, "load adapter "+dir)
	defer func() { err = absent(err, "give a folder that SaveAdapter or PEFT has written") }()
	var o object
	if _, err := readJSON(filepath.Join(dir, adapterConfigName), maxConfig, &o); err != nil {
		return err
	}
	var l LoRA
	if err := errors.Join(o.only(map[string][]any{
		"peft_type": {"LORA"}, "bias": {nil, "", "none"}, "modules_to_save": {nil, []any{}},
		"use_dora": {nil, false}, "use_rslora": {nil, false}, "layers_to_transform": {nil},
		"rank_pattern": {nil, map[string]any{}}, "alpha_pattern": {nil, map[string]any{}},
	}), o.into(map[string]any{
		"r": &l.Rank, "lora_alpha": &l.Alpha, "target_modules": &l.Targets,
	})); err != nil {
		return fmt.Errorf("%s: %w", adapterConfigName, err)
	}
	file, err := safetensors.Open(filepath.Join(dir, adapterName))
	if err == nil {
		err = errors.Join(file.Keep(), m.Adapt(l))
	}
	if err != nil {
		return err
	}
	m.adapter = located{}
	for _, name := range file.Names() {
		m.adapter[name] = file
	}
	return nil
}

// isAdapter reports whether a learnable is one of an adapter.
func isAdapter(learnable string) bool {
	return strings.HasSuffix(learnable, loraA+".weight") ||
		strings.HasSuffix(learnable, loraB+".weight")
}

// SaveAdapter writes an adapter as a folder that LoadAdapter and PEFT read. weights are the whole
// learnables of a graph, by name, as for Save.
//
// It is not collective: call it on one rank. Errors: [backend.ErrArgument] without Adapt or
// LoadAdapter, for learnables that are missing or not in the adapter, and for an element that is
// not finite; those of the file system.
func (m *Model) SaveAdapter(dir string, weights map[string]*tensor.Dense) (err error) {
	defer named(&err, "save adapter "+dir)
	if m.lora == nil || len(weights) == 0 {
		return fmt.Errorf("%w: there is no adapter: call Adapt, and give its learnables",
			backend.ErrArgument)
	}
	all := m.adapters()
	if name := missing(all, weights); name != "" {
		return fmt.Errorf("%w: there is no %s among the weights: give all learnables",
			backend.ErrArgument, name)
	}
	for learnable, x := range weights {
		if x == nil || x.Dims() < 2 || !all[learnable] {
			return fmt.Errorf("%w: %s is none of an adapter, or no matrix, among %d learnables: "+
				"the adapter has %d", backend.ErrArgument, learnable, len(weights), len(all))
		}
	}
	tensors, err := m.encode(weights)
	if err != nil {
		return err
	}
	text, err := json.MarshalIndent(map[string]any{
		"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": m.dir,
		"r": m.lora.Rank, "lora_alpha": m.lora.Alpha, "lora_dropout": 0,
		"target_modules": m.lora.Targets, "fan_in_fan_out": m.Type == gpt2, "bias": "none",
		"use_rslora": false, "use_dora": false,
	}, "", "  ")
	if err != nil {
		return err
	}
	return write(dir, adapterName, tensors, map[string][]byte{adapterConfigName: text})
}

// adapters returns the learnables of the adapter, by the linear layers of the files.
func (m *Model) adapters() map[string]bool {
	all := map[string]bool{}
	for name := range m.weights {
		layer, ok := strings.CutSuffix(name, ".weight")
		if !ok || !m.target(layer) {
			continue
		}
		if m.Type == gpt2 { // whose older files have no prefix
			layer = gpt2Prefix + strings.TrimPrefix(layer, gpt2Prefix)
		}
		all[layer+loraA+".weight"], all[layer+loraB+".weight"] = true, true
	}
	return all
}

// target reports whether a linear layer has an adapter.
func (m *Model) target(name string) bool {
	last := name[strings.LastIndexByte(name, '.')+1:]
	return m.lora != nil && slices.Contains(m.lora.Targets, last)
}

// columns is a linear layer whose weights are divided by columns: x is Copied over the Tensor
// group.
func (m *Model) columns(b *layers.Builder, name string, x layers.Node, biased bool, axis int,
	out ...int) layers.Node {
	linear := b.Linear
	if biased {
		linear = b.Columns
	}
	y := linear(name, x, axis, out...)
	if m.target(name) {
		h := b.Dense(name+loraA, x, m.lora.Rank)
		y = b.Add(y, m.scaled(b, b.Linear(name+loraB, h, axis, out...)))
	}
	return y
}

// rows is a linear layer whose weights are divided by rows: x is Split over the Tensor group along
// one of its last axes, in of them, and the terms are added up.
func (m *Model) rows(b *layers.Builder, name string, x layers.Node, in int,
	biased bool) layers.Node {
	y := b.To(b.Rows(name, x, in, m.Width), layers.Tensor, layers.Replicated)
	if biased {
		y = b.Bias(name, y)
	}
	if m.target(name) {
		h := b.To(b.Rows(name+loraA, x, in, m.lora.Rank), layers.Tensor, layers.Replicated)
		y = b.Add(y, m.scaled(b, b.Dense(name+loraB, h, m.Width)))
	}
	return y
}

// scaled returns what an adapter adds.
func (m *Model) scaled(b *layers.Builder, x layers.Node) layers.Node {
	by := m.lora.Alpha / float64(m.lora.Rank)
	if by == 1 {
		return x
	}
	return b.Apply("scale of an adapter", func() (layers.Node, error) {
		var number any = by
		if x.Dtype() == tensor.Float32 {
			number = float32(by)
		}
		y, err := gorgonia.HadamardProd(x.Node, gorgonia.NewConstant(number))
		return layers.Place(y, x), err
	})
}
