package models

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/safetensors"
	"github.com/euryale-ml/euryale/layers"
)

// Model is a model of a folder, whose files are open until Close.
type Model struct {
	Config
	dir     string
	text    []byte // of config.json
	files   []*safetensors.File
	weights located
	lora    *LoRA   // nil for none
	adapter located // what it begins with, nil for nothing
}

// Load reads the configuration of a folder and the headers of its weights. It is not collective:
// every rank loads.
//
// Errors: [backend.ErrUnsupported] for a model that this package has not; [backend.ErrArgument] for
// sizes that do not fit; a damaged file; those of the file system.
func Load(dir string) (_ *Model, err error) {
	defer named(&err, "load "+dir)
	m := &Model{dir: dir}
	var o object
	if m.text, err = readJSON(filepath.Join(dir, configName), maxConfig, &o); err != nil {
		return nil, err
	}
	if err = m.Config.read(o); err != nil {
		return nil, fmt.Errorf("%s: %w", configName, err)
	}
	if m.weights, err = m.openWeights(); err != nil {
		return nil, errors.Join(err, m.Close())
	}
	maps.DeleteFunc(m.weights, m.ignored)
	return m, nil
}

// named says what has failed.
func named(err *error, what string) {
	if *err != nil {
		*err = fmt.Errorf("models: %s: %w", what, *err)
	}
}

// Close closes the files. The model builds no graphs after it.
func (m *Model) Close() error {
	var errs []error
	for _, file := range m.files {
		errs = append(errs, file.Close())
	}
	return errors.Join(errs...)
}

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
	return m.build(b, tokens, &caching{})
}

// build is Logits, with the caches of c.
func (m *Model) build(b *layers.Builder, tokens *layers.Tokens, c *caching) (layers.Node, error) {
	used := map[string]bool{}
	b.Begin(func(learnable string, shape []int) ([]float64, error) {
		begins := m.adapter == nil && isAdapter(learnable)
		switch {
		case c.tensors[learnable] != nil || begins && strings.HasSuffix(learnable, loraB+".weight"):
			return make([]float64, tensor.ProdInts(shape)), nil
		case begins:
			return nil, nil // drawn
		}
		return m.values(learnable, shape, used)
	})
	defer b.Begin(nil)
	if m.lora != nil {
		b.Freeze(func(learnable string) bool { return !isAdapter(learnable) })
		defer b.Freeze(nil)
	}
	family := m.llama
	if m.Type == gpt2 {
		family = m.gpt2
	}
	logits := family(b, tokens, c)
	err := b.Err()
	if err == nil && len(c.tensors) == 0 { // else what there is has been looked at
		err = errors.Join(m.weights.allUsed(used, configName),
			m.adapter.allUsed(used, adapterConfigName))
	}
	if err != nil {
		return logits, fmt.Errorf("models: %s: %w", m.dir, err)
	}
	return logits, nil
}

// values returns the elements of a learnable, of its whole shape, and notes the tensor.
func (m *Model) values(learnable string, shape []int, used map[string]bool) ([]float64, error) {
	s, err := m.find(learnable, shape)
	if err != nil {
		return nil, err
	}
	used[s.name] = true
	t, err := s.file.Read(s.name)
	if err != nil {
		return nil, err
	}
	x, err := numbers(t.Data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.name, err)
	}
	if s.transposed {
		x = transpose(x, s.shape[0], s.shape[1])
	}
	return x, nil
}

// stored is how a learnable is in a file.
type stored struct {
	name       string
	shape      []int
	transposed bool              // a matrix that is [out, in] there, and [in..., out...] here
	file       *safetensors.File // after find
}

// stored returns how the files have a learnable of a shape.
func (m *Model) stored(learnable string, shape []int) stored {
	in := 1 // of the axes are the input of a linear layer
	switch {
	case strings.HasSuffix(learnable, ".gain"):
		return stored{name: strings.TrimSuffix(learnable, ".gain") + ".weight", shape: shape}
	case strings.HasSuffix(learnable, ".bias"):
		return stored{name: learnable, shape: []int{tensor.ProdInts(shape)}}
	case strings.HasSuffix(learnable, loraA+".weight"):
		in = len(shape) - 1
	case strings.HasSuffix(learnable, ".attn.c_proj.weight"),
		strings.HasSuffix(learnable, ".o_proj.weight"):
		in = min(2, len(shape)) // heads, and their elements
	}
	s := stored{name: learnable, shape: []int{tensor.ProdInts(shape[:in]),
		tensor.ProdInts(shape[in:])}}
	if isAdapter(learnable) {
		s.name, s.transposed = adapterPrefix+learnable, true
	} else {
		s.transposed = m.Type != gpt2 && strings.HasSuffix(learnable, "_proj.weight")
	}
	if s.transposed {
		slices.Reverse(s.shape)
	}
	return s
}

// find is stored with the file.
func (m *Model) find(learnable string, shape []int) (stored, error) {
	s := m.stored(learnable, shape)
	all, missing, config := m.weights, "no file has", configName
	if isAdapter(learnable) {
		all, missing, config = m.adapter, adapterName+" has no", adapterConfigName
	}
	if s.file = all[s.name]; s.file == nil { // in older files, perhaps
		s.name = strings.TrimPrefix(s.name, gpt2Prefix)
		s.file = all[s.name]
	}
	if s.file == nil {
		return s, fmt.Errorf("%w: %s %s", backend.ErrArgument, missing, s.name)
	}
	if _, is, _ := s.file.Of(s.name); !slices.Equal(is, s.shape) {
		return s, fmt.Errorf("%w: %s has shape %v in %s, and by %s it is %v", backend.ErrArgument,
			s.name, is, s.file.Name(), config, s.shape)
	}
	return s, nil
}

// located is the file of each tensor, by name.
type located map[string]*safetensors.File

// first returns the first tensor that is not among used, "" if there is none.
func (l located) first(used map[string]bool) string {
	for _, name := range slices.Sorted(maps.Keys(l)) {
		if !used[name] {
			return name
		}
	}
	return ""
}

// allUsed returns an error for a tensor that is not among used.
func (l located) allUsed(used map[string]bool, config string) error {
	if name := l.first(used); name != "" {
		return fmt.Errorf("%w: %s has %s, and by %s there is none", backend.ErrArgument,
			l[name].Name(), name, config)
	}
	return nil
}
