package models

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"maps"
	"math"
	"slices"
	"strings"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
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
	// Targets are names of linear layers, or their last parts, such as "q_proj" and "mlp.c_proj";
	// nil means c_attn in GPT-2, and q_proj and v_proj in the Llama family, as in PEFT, and
	// "all-linear" alone means all but the output head.
	Targets []string
	// Dropout is the probability with which an element of x counts as 0 for A, in training: see
	// Model.Random.
	Dropout float64
	// RankStabilized scales by Alpha/sqrt(Rank). Source: Kalajdzievski, "A Rank Stabilization
	// Scaling Factor for Fine-Tuning with LoRA", 2023.
	RankStabilized bool
}

const (
	adapterConfigName = "adapter_config.json"
	adapterName       = "adapter_model.safetensors"
	// adapterPrefix begins the names of PEFT's tensors.
	adapterPrefix = "base_model.model."
	loraA, loraB  = ".lora_A", ".lora_B"
)

// adapter is what an adapter changes.
type adapter struct {
	layers  map[string]lowRank // of linear layers, by name
	dropout float64
	biased  bool // B has a bias
	// replaced has tensors of the model that the adapter has, too, and their names in its file.
	replaced map[string]string
	config   []byte  // adapter_config.json, for SaveAdapter: the order of patterns counts
	tensors  located // what it begins with, nil for nothing
}

// lowRank is the adapter of a layer.
type lowRank struct {
	rank  int
	scale float64
}

// of returns the adapter of a linear layer.
func (a *adapter) of(layer string) (l lowRank, ok bool) {
	if a != nil {
		l, ok = a.layers[layer]
	}
	return l, ok
}

// parts reports whether an embedding that is the output head, too, does not any more: PEFT gives
// modules_to_save weights of their own.
func (a *adapter) parts(embedding string) bool {
	return a != nil && (a.replaced[embedding] != "" || a.replaced[headName] != "")
}

// learns reports whether an adapter learns a tensor of the model, or has made it.
func (a *adapter) learns(learnable string) bool {
	return isAdapter(learnable) || a.replaced[nameOf(learnable)] != ""
}

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
// Errors: [backend.ErrArgument] for a rank below 1, an alpha that is not a number, a dropout that
// is not from 0 to less than 1, layers that the model lacks, and after Logits, whose graph would
// have no adapter.
func (m *Model) Adapt(l LoRA) error {
	if err := m.unbuilt(); err != nil {
		return fmt.Errorf("models: LoRA: %w", err)
	}
	all, adapted := m.linears()
	switch {
	case l.Targets == nil:
		l.Targets = adapted
	case slices.Equal(l.Targets, []string{"all-linear"}):
		l.Targets = all
	}
	if l.Rank < 1 || len(l.Targets) == 0 || math.IsNaN(l.Alpha) || math.IsInf(l.Alpha, 0) ||
		!(l.Dropout >= 0 && l.Dropout < 1) {
		return fmt.Errorf("models: LoRA: %w: rank %d, alpha %v, dropout %v, %d layers",
			backend.ErrArgument, l.Rank, l.Alpha, l.Dropout, len(l.Targets))
	}
	p := peft{rank: l.Rank, alpha: cmp.Or(l.Alpha, float64(l.Rank)), stable: l.RankStabilized,
		dropout: l.Dropout, targets: patterns{list: l.Targets}, bias: "none"}
	for _, name := range l.Targets {
		one := peft{rank: 1, targets: patterns{list: []string{name}}, bias: "none"}
		if _, err := one.resolve(m); err != nil {
			return fmt.Errorf("models: LoRA: %w: %s has no layers %q: use some of %s",
				backend.ErrArgument, m.Type, name, strings.Join(all, ", "))
		}
	}
	a, err := p.resolve(m)
	if err != nil {
		return fmt.Errorf("models: LoRA: %w", err)
	}
	a.config, err = json.MarshalIndent(map[string]any{
		"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": m.dir.Path(""),
		"r": p.rank, "lora_alpha": p.alpha, "lora_dropout": p.dropout, "target_modules": l.Targets,
		"fan_in_fan_out": m.Type == gpt2, "bias": "none", "use_rslora": p.stable, "use_dora": false,
	}, "", "  ")
	if err != nil {
		return fmt.Errorf("models: LoRA: %w", err)
	}
	m.adapter = a
	return nil
}

// unbuilt returns an error if a graph has been built.
func (m *Model) unbuilt() error {
	if m.built {
		return fmt.Errorf("%w: Logits has built a graph without this adapter: call Adapt or "+
			"LoadAdapter before Logits", backend.ErrArgument)
	}
	return nil
}

// LoadAdapter is Adapt with the adapter of a PEFT folder: its adapter_config.json and
// adapter_model.safetensors. It adapts the layers that PEFT adapts, with the same ranks and scales;
// biases and modules_to_save are learnables, too.
//
// Errors: [backend.ErrUnsupported] for another kind of adapter, for one whose loading changes the
// model's weights (PiSSA, OLoRA, CorDA, LoftQ), and for a key that may change what is computed and
// is not known here; [backend.ErrArgument] for layers that the model lacks; a damaged file; those
// of the file system. Shapes are checked when a graph is built. The files are closed.
func (m *Model) LoadAdapter(dir string) (err error) {
	defer named(&err, "load adapter "+dir)
	defer func() { err = absent(err, "give a folder that SaveAdapter or PEFT has written") }()
	if err := m.unbuilt(); err != nil {
		return err
	}
	var o object
	in, err := files.At(dir, m.store...)
	if err != nil {
		return err
	}
	text, err := in.ReadJSON(adapterConfigName, maxConfig, &o)
	if err != nil {
		return err
	}
	var p peft
	if err = p.read(&o); err != nil {
		return fmt.Errorf("%s: %w", adapterConfigName, err)
	}
	a, err := p.resolve(m)
	if err != nil {
		return fmt.Errorf("%s: %w", adapterConfigName, err)
	}
	file, err := safetensors.Open(in, adapterName)
	if errors.Is(err, fs.ErrNotExist) {
		err = unread(err, in, "adapter_model.bin")
	}
	if err == nil {
		err = file.Keep()
	}
	if err != nil {
		return err
	}
	a.config, a.tensors = text, located{}
	for _, name := range file.Names() {
		a.tensors[name] = file
		if copied, err := m.copied(a, name); err != nil {
			return err
		} else if copied {
			delete(a.tensors, name)
		}
	}
	m.adapter = a
	return nil
}

// copied reports whether a tensor of an adapter is one of the model, as PEFT saves an adapted head.
func (m *Model) copied(a *adapter, name string) (bool, error) {
	own := strings.Replace(strings.TrimPrefix(name, adapterPrefix), ".base_layer.", ".", 1)
	base := m.fileOf(own)
	if base.file == nil || a.replaced[own] != "" {
		return false, nil
	}
	return equal(stored{name: name, file: a.tensors[name]}, base)
}

// isAdapter reports whether a learnable is one of the matrices of an adapter, or a bias of B.
func isAdapter(learnable string) bool {
	return strings.HasSuffix(learnable, loraA+".weight") ||
		strings.HasSuffix(learnable, loraB+".weight") || strings.HasSuffix(learnable, loraB+".bias")
}

// SaveAdapter writes an adapter as a folder that LoadAdapter and PEFT read. weights are the whole
// learnables of a graph, by name, as for Save.
//
// It is not collective: call it on one rank. While files are replaced by those of another adapter,
// the directory has no adapter_config.json, and is none. Errors: [backend.ErrArgument] without
// Adapt or LoadAdapter, for learnables that are missing or not in the adapter, for an element that
// is not finite, and for a directory with another model than this one, to which transformers would
// apply the adapter; those of the file system.
func (m *Model) SaveAdapter(dir string, weights iter.Seq2[string, *tensor.Dense]) (err error) {
	defer named(&err, "save adapter "+dir)
	if err := backend.Given("", "weights", weights); err != nil {
		return err
	}
	learnables := maps.Collect(weights)
	if m.adapter == nil || len(learnables) == 0 {
		return fmt.Errorf("%w: there is no adapter: call Adapt, and give its learnables",
			backend.ErrArgument)
	}
	r := replacing{main: adapterConfigName, text: m.adapter.config,
		tensors: map[string]safetensors.Tensor{}, texts: map[string][]byte{},
		outdated: []string{"adapter_model.bin"}}
	all := m.adapterTensors()
	for learnable, x := range learnables {
		if err := hasAxes(x); err != nil {
			return fmt.Errorf("%s: %w", learnable, err)
		}
		s := m.stored(learnable, x.Shape())
		if !all[s.name] {
			return fmt.Errorf("%w: %s is none of the adapter, among %d learnables: the adapter "+
				"has %d", backend.ErrArgument, learnable, len(learnables), len(all))
		}
		r.tensors[s.name] = safetensors.Declared(backend.F32, s.shape)
	}
	if name := lacking(all, r.tensors); name != "" {
		return fmt.Errorf("%w: there is no %s among the weights: give all learnables",
			backend.ErrArgument, strings.TrimPrefix(name, adapterPrefix))
	}
	r.shards = map[string][]string{adapterName: slices.Collect(maps.Keys(r.tensors))}
	in, err := files.At(dir, m.store...)
	if err != nil {
		return err
	}
	if _, err := in.Stat(configName); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	} else if err == nil && !same(in, m.dir) {
		return fmt.Errorf("%w: it has a model, and transformers would apply the adapter to it: "+
			"name another folder", backend.ErrArgument)
	}
	r.dir = in
	return r.write(m, maps.All(learnables))
}

// adapterTensors returns the names of the tensors of the adapter's file.
func (m *Model) adapterTensors() map[string]bool {
	all := map[string]bool{}
	for layer := range m.adapter.layers {
		all[adapterPrefix+layer+loraA+".weight"] = true
		all[adapterPrefix+layer+loraB+".weight"] = true
		if m.adapter.biased {
			all[adapterPrefix+layer+loraB+".bias"] = true
		}
	}
	for _, name := range m.adapter.replaced {
		all[adapterPrefix+name] = true
	}
	return all
}

// columns is a linear layer whose weights are sharded by columns: x is Copied over the Tensor
// group.
func (m *Model) columns(b *layers.Builder, name string, x layers.Node, biased bool, axis int,
	out ...int) layers.Node {
	y := linear(b, biased)(name, x, axis, out...)
	return m.adaptColumns(b, name, x, y, axis, out...)
}

// linear returns the function of a layer with a bias or without one.
func linear(b *layers.Builder, biased bool) func(string, layers.Node, int, ...int) layers.Node {
	if biased {
		return b.Columns
	}
	return b.Linear
}

// adaptColumns adds to y what an adapter has for columns.
func (m *Model) adaptColumns(b *layers.Builder, name string, x, y layers.Node, axis int,
	out ...int) layers.Node {
	l, ok := m.adapter.of(name)
	if !ok {
		return y
	}
	h := b.Dense(name+loraA, m.dropped(b, m.adapter.dropout, x), l.rank)
	return l.add(b, y, linear(b, m.adapter.biased)(name+loraB, h, axis, out...))
}

// rows is a linear layer whose weights are sharded by rows: x is Split over the Tensor group along
// one of its last axes, in of them, and the terms are added up.
func (m *Model) rows(b *layers.Builder, name string, x layers.Node, in int,
	biased bool) layers.Node {
	y := b.To(b.Rows(name, x, in, m.Width), layers.Tensor, layers.Replicated)
	if biased {
		y = b.Bias(name, y)
	}
	l, ok := m.adapter.of(name)
	if !ok {
		return y
	}
	h := b.Rows(name+loraA, m.dropped(b, m.adapter.dropout, x), in, l.rank)
	h = b.Dense(name+loraB, b.To(h, layers.Tensor, layers.Replicated), m.Width)
	if m.adapter.biased {
		h = b.Bias(name+loraB, h)
	}
	return l.add(b, y, h)
}

// add adds what an adapter computes.
func (l lowRank) add(b *layers.Builder, y, x layers.Node) layers.Node {
	return b.Add(y, b.Apply("scale of an adapter", func() (layers.Node, error) {
		n, err := scaled(x.Node, l.scale)
		return layers.Place(n, x), err
	}))
}
