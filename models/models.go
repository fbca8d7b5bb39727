package models

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/safetensors"
	"github.com/euryale-ml/euryale/layers"
)

// Model is a model of a folder, whose files are open until Close.
type Model struct {
	Config
	dir     string
	text    []byte // of config.json
	weights *folder
	lora    *LoRA                         // nil for none
	adapter map[string]safetensors.Tensor // what it begins with, nil for nothing
}

// Load reads the configuration of a folder and the headers of its weights. It is not collective:
// every rank loads.
//
// Errors: [ErrUnsupported] for a model that this package has not; [backend.ErrArgument] for sizes
// that do not fit; a damaged file; those of the file system.
func Load(dir string) (_ *Model, err error) {
	defer named(&err, "load", dir)
	m := &Model{dir: dir}
	if m.Config, m.text, err = readConfig(dir); err == nil {
		m.weights, err = openFolder(dir)
	}
	if err != nil {
		return nil, err
	}
	return m, nil
}

// named says what has failed with a folder.
func named(err *error, what, dir string) {
	if *err != nil {
		*err = fmt.Errorf("models: %s %s: %w", what, dir, *err)
	}
}

// Close closes the files. The model builds no graphs after it.
func (m *Model) Close() error { return m.weights.close() }

// Logits builds the model: scores of each word of the vocabulary as the next one.
//
//	in   tokens  [batch, positions], divided along axis 1 by the Sequence group
//	out  logits  [batch, positions, vocabulary], Split(2) over the Tensor group
//
// Learnables are made in the builder, and begin with the folder's values.
//
// Errors: those of the builder, such as [ops.ErrShape] for more positions than GPT-2 has, and for
// fewer heads of keys than ranks that divide them; [backend.ErrArgument] for missing tensors, wrong
// shapes, and tensors that the model has not; those of reading the files.
func (m *Model) Logits(b *layers.Builder, tokens *layers.Tokens) (layers.Node, error) {
	if err := backend.Given("models.Logits", "b", b, "tokens", tokens); err != nil {
		return layers.Node{}, err
	}
	return m.build(b, tokens, nil)
}

// build is Logits, with caches of keys and values if c is not nil.
func (m *Model) build(b *layers.Builder, tokens *layers.Tokens, c *caching) (layers.Node, error) {
	used := map[string]bool{}
	b.Begin(func(learnable string, shape []int) ([]float64, error) {
		if c.has(learnable) {
			return make([]float64, size(shape)), nil
		}
		if isAdapter(learnable) {
			return m.adapterValues(learnable, shape, used)
		}
		return m.values(learnable, shape, used)
	})
	defer b.Begin(nil)
	if m.lora != nil {
		b.Freeze(func(learnable string) bool { return !isAdapter(learnable) })
		defer b.Freeze(nil)
	}
	var logits layers.Node
	if m.Type == gpt2 {
		logits = m.gpt2(b, tokens, c)
	} else {
		logits = m.llama(b, tokens, c)
	}
	err := b.Err()
	if err == nil && c.shares() { // what there is has been looked at
		return logits, nil
	}
	if name := m.first(used); err == nil && name != "" {
		err = fmt.Errorf("%w: %s has %s, and by %s there is none", backend.ErrArgument,
			m.weights.at[name].Name(), name, configName)
	}
	for name := range m.adapter {
		if err == nil && !used[name] {
			err = fmt.Errorf("%w: %s has %s, and by %s there is none", backend.ErrArgument,
				adapterName, name, adapterConfigName)
		}
	}
	if err != nil {
		return logits, fmt.Errorf("models: %s: %w", m.dir, err)
	}
	return logits, nil
}

// values returns the elements of a learnable, of its whole shape, and notes the tensor.
func (m *Model) values(learnable string, shape []int, used map[string]bool) ([]float64, error) {
	name, at, _, err := m.find(learnable, shape)
	if err != nil {
		return nil, err
	}
	used[name] = true
	t, err := at.Read(name)
	if err != nil {
		return nil, err
	}
	return decoded(name, t, m.transposed(learnable))
}

// decoded returns the elements of a tensor, a matrix if it is transposed.
func decoded(name string, t safetensors.Tensor, turned bool) ([]float64, error) {
	x, err := numbers(t.Data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if turned {
		x = transpose(x, t.Shape[0], t.Shape[1])
	}
	return x, nil
}

// find returns the tensor of a learnable of a shape: its name, file and shape there.
func (m *Model) find(learnable string, shape []int) (name string, at *safetensors.File,
	stored []int, err error) {
	name, stored = m.stored(learnable, shape)
	at = m.weights.at[name]
	if older := strings.TrimPrefix(name, gpt2Prefix); at == nil {
		name, at = older, m.weights.at[older]
	}
	if at == nil {
		return name, nil, nil, fmt.Errorf("%w: no file has %s", backend.ErrArgument, name)
	}
	if _, is, _ := at.Of(name); !slices.Equal(is, stored) {
		return name, nil, nil, fmt.Errorf("%w: %s has shape %v in %s, and by %s it is %v",
			backend.ErrArgument, name, is, at.Name(), configName, stored)
	}
	return name, at, stored, nil
}

// first returns a tensor of the files that is a learnable of the model and not among used, "" if
// there is none.
func (m *Model) first(used map[string]bool) string {
	for _, name := range slices.Sorted(maps.Keys(m.weights.at)) {
		tied := m.Tied && name == headName // the embedding once more
		if !used[name] && !ignored(name) && !tied {
			return name
		}
	}
	return ""
}

// stored returns name and shape of a learnable in the files.
func (m *Model) stored(learnable string, shape []int) (string, []int) {
	name, gain := strings.CutSuffix(learnable, ".gain")
	in := 1 // of the axes are the input of a linear layer
	if strings.HasSuffix(name, ".attn.c_proj.weight") || strings.HasSuffix(name, ".o_proj.weight") {
		in = 2 // heads, and their elements
	}
	in = min(in, len(shape)) // of a shape that find refuses
	switch {
	case gain:
		return name + ".weight", shape
	case strings.HasSuffix(name, ".bias"):
		return name, []int{size(shape)}
	case m.transposed(name):
		return name, []int{size(shape[in:]), size(shape[:in])}
	}
	return name, []int{size(shape[:in]), size(shape[in:])}
}

// transposed reports whether a learnable is [out, in] in the files.
func (m *Model) transposed(learnable string) bool {
	return m.Type != gpt2 && strings.HasSuffix(learnable, "_proj.weight")
}

// transpose returns a matrix of rows and columns, transposed.
func transpose(x []float64, rows, columns int) []float64 {
	y := make([]float64, len(x))
	const block = 64 // of which two fit a core's first cache
	for r0 := 0; r0 < rows; r0 += block {
		for c0 := 0; c0 < columns; c0 += block {
			for r := r0; r < min(r0+block, rows); r++ {
				for c := c0; c < min(c0+block, columns); c++ {
					y[c*rows+r] = x[r*columns+c]
				}
			}
		}
	}
	return y
}

func size(shape []int) int {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return n
}
