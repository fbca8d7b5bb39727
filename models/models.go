package models

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"syscall"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/safetensors"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/ops/nn"
)

// Model is the model of a folder, whose files are open until Close.
type Model struct {
	Config
	dir     files.Dir
	store   []files.Opener
	text    []byte // of config.json
	files   []*safetensors.File
	headers int64 // bytes of theirs
	weights located
	adapter *adapter // nil for none
	built   bool     // a graph, by Logits
	// Random draws the masks of dropout, which the configurations of the model and of its adapter
	// ask for: in training, as in transformers, and not in evaluation (vm.Eval). Call its Next
	// after each run that trains. Load makes one; nil leaves dropout out of graphs that are built
	// from then on.
	Random *nn.Random
	// MaxShardSize is the most bytes of a file of tensors that Save writes, unless one tensor has
	// more; 0 is 5e9.
	MaxShardSize int64
	generation   generation
}

// Load reads config.json and generation_config.json of a folder, and the headers of its weights,
// whose values are read when a graph is built. Matrices of 16-bit floats that nothing trains stay
// where they are: in a Generator, beside an adapter, and with [layers.Builder.Freeze] in Logits.
// Files of a disk are mapped for that, as long as the process lives, and must not be written in
// place: replace them by renaming others, as Save does. One that has another length by then is an
// error of the next graph; a run that reads what is cut off ends the process, by SIGBUS.
//
// It is not collective: each rank that needs the model calls it. store opens URLs, such as
// bucket.Open: of dir, and of what Save, LoadAdapter and SaveAdapter get. Of files elsewhere, too,
// only the needed parts are read.
//
// Errors: [backend.ErrUnsupported] names a type of model, a key or a value that this package lacks;
// [backend.ErrArgument] is for sizes that do not fit, and tensors of two files with one name; a
// damaged file; those of the file system.
func Load(dir string, store ...func(url string) (fs.FS, error)) (_ *Model, err error) {
	defer named(&err, "load "+dir)
	m := &Model{store: store, Random: nn.NewRandom(0)}
	if m.dir, err = files.At(dir, store...); err != nil {
		return nil, err
	}
	var o object
	if m.text, err = m.dir.ReadJSON(configName, maxConfig, &o); err != nil {
		hint := "give a folder of Hugging Face, with config.json, tokenizer.json and " + weightsName
		if _, other := m.dir.Stat(adapterConfigName); other == nil {
			hint = "the folder has a LoRA adapter and no model: load the model that " +
				adapterConfigName + " names, and then the adapter, by LoadAdapter or --adapter"
		}
		return nil, absent(err, hint)
	}
	if err = m.Config.read(&o); err != nil {
		return nil, fmt.Errorf("%s: %w", configName, err)
	}
	if err = m.readGeneration(o); err != nil {
		return nil, err
	}
	if m.weights, err = m.openWeights(); err != nil {
		return nil, errors.Join(err, m.Close())
	}
	if err = m.leaveOut(); err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return m, nil
}

// absent says what to do about a missing file.
func absent(err error, hint string) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return fmt.Errorf("%w: %s", err, hint)
	}
	return err
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

// Logits builds the model, which scores each word of the vocabulary as the next one.
//
//	in   tokens  [batch, positions], divided along axis 1 by the Sequence group
//	out  logits  [batch, positions, vocabulary], Split(2) over the Tensor group
//
// Learnables are made in the builder, and begin with the folder's values.
//
// positions are for samples of several documents, as [layers.Tokens.Documents] takes them: the
// positions of the tokens in their documents, which then have the logits that they have alone.
//
// Errors: those of the builder, such as [ops.ErrShape] for more positions than GPT-2 has, and for
// fewer heads of keys than ranks that shard them; [backend.ErrArgument] for missing tensors, wrong
// shapes, and tensors that the model lacks, and for several positions; [backend.ErrUnsupported]
// for positions where the rotary angles follow from the length of a text; those of reading the
// files.
func (m *Model) Logits(b *layers.Builder, tokens *layers.Tokens,
	positions ...*layers.Tokens) (layers.Node, error) {
	err := backend.Given("models.Logits", "b", b, "tokens", tokens, "positions", positions)
	if err == nil && len(positions) > 1 {
		err = fmt.Errorf("models: Logits: %w: %d positions: give one, or none",
			backend.ErrArgument, len(positions))
	}
	if err != nil {
		return layers.Node{}, err
	}
	c := &caching{}
	if len(positions) > 0 {
		c.positions = positions[0]
	}
	logits, err := m.build(b, tokens, c)
	m.built = m.built || err == nil
	return logits, err
}

// build is Logits, with the caches of c.
func (m *Model) build(b *layers.Builder, tokens *layers.Tokens, c *caching) (layers.Node, error) {
	used := map[string]bool{}
	b.Begin(func(learnable string, shape []int) (x backend.Buffer, behind int, err error) {
		begins := isAdapter(learnable) && m.adapter.tensors == nil
		switch t := c.tensors[learnable]; {
		case t != nil && t.Shape().TotalSize() != tensor.ProdInts(shape): // a rank's part
			n, behind := tensor.ProdInts(shape), 0
			d, _ := residence.DType(t.Dtype())
			if d != backend.F32 {
				behind = m.stored(learnable, shape).behind
			}
			return backend.Of(make([]float32, n)).As(d).Slice(0, n), behind, nil
		case t != nil && t.Dtype() == tensor.Float32:
			x, err = residence.Memory(t, backend.F32)
			return x, 0, err
		case t != nil:
			d, _ := residence.DType(t.Dtype())
			x, err = residence.Memory(t, d)
			return x, m.stored(learnable, shape).behind, err
		case begins && strings.Contains(learnable, loraB+"."):
			return backend.Of(make([]float32, tensor.ProdInts(shape))), 0, nil
		case begins:
			return x, 0, nil // drawn
		}
		return m.values(learnable, shape, used)
	})
	defer b.Begin(nil)
	switch {
	case c.context > 0: // to generate
		b.Freeze(func(string) bool { return true })
		defer b.Freeze(nil)
	case m.adapter != nil:
		b.Freeze(func(learnable string) bool { return !m.adapter.learns(learnable) })
		defer b.Freeze(nil)
	}
	family := m.llamas
	if m.Type == gpt2 {
		family = m.gpt2
	}
	logits := family(b, tokens, c)
	err := b.Err()
	if err == nil && len(c.tensors) == 0 { // else what there is has been looked at
		err = m.weights.allUsed(used, configName)
		if m.adapter != nil {
			err = errors.Join(err, m.adapter.tensors.allUsed(used, adapterConfigName))
		}
	}
	if err != nil {
		return logits, fmt.Errorf("models: %s: %w", m.dir.Path(""), err)
	}
	return logits, nil
}
