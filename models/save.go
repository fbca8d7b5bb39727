package models

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math"
	"os"
	"path"
	"slices"
	"strings"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/safetensors"
)

// besides are the files of a folder that are copied as they are.
var besides = []string{"generation_config.json", "tokenizer.json", "tokenizer_config.json",
	"special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model",
	"tekken.json", "chat_template.jinja", "chat_template.json"}

// maxText is the most bytes of such a file.
const maxText = 256 << 20

// outdated are the files that programs would take for a part of a model, as patterns with numbers
// of five digits for stars: its other files of weights, and an adapter.
var outdated = []string{indexName, "model-*-of-*.safetensors", "pytorch_model.bin",
	"pytorch_model.bin.index.json", "pytorch_model-*-of-*.bin", adapterConfigName, adapterName,
	"adapter_model.bin"}

// Save writes a folder that Load and transformers read: the model with other weights, in the dtypes
// of the folder that was loaded, its configuration and its tokenizer. weights are whole learnables
// by name, such as those of a checkpoint, whatever the layout that wrote it:
//
//	weights, err := autograd.ReadWeights(checkpoints)
//	err = m.Save("tuned", weights)
//
// It is not collective: call it on one rank. The directory may exist, and be a URL, which the store
// of Load opens. Each file replaces an old one
// when it is on the disk. Save removes what programs would take for a part of the model: the index
// and the numbered files of an earlier model, weights in Python's format, an adapter, and a
// generation_config.json and files of a tokenizer that the model's own folder lacks. Other files
// stay. Unless only weights change, there is no config.json in the meantime, so that nothing loads
// parts of two models.
//
// Cost: the model's memory twice. On Windows, close models that were loaded from the directory:
// open files cannot be replaced. Errors: [backend.ErrArgument] for learnables that are missing,
// unknown or of another shape, with an element that is NaN, infinite or too large for the dtype of
// the folder, and for the folder that the model was loaded from; those of the file system.
func (m *Model) Save(dir string, weights map[string]*tensor.Dense) (err error) {
	defer named(&err, "save "+dir)
	tensors, err := m.encode(weights)
	if err != nil {
		return err
	}
	if name := lacking(m.weights, tensors); name != "" {
		return fmt.Errorf("%w: there is no %s among the weights: give all learnables",
			backend.ErrArgument, name)
	}
	if name := lacking(tensors, m.weights); name != "" {
		return fmt.Errorf("%w: %s is among the weights, but the model has no such weight: leave "+
			"it out", backend.ErrArgument, name)
	}
	if _, err := m.dir.Stat("."); err != nil {
		return err // its tokenizer is copied below
	}
	in, err := files.At(dir, m.store...)
	if err != nil {
		return err
	}
	if same(in, m.dir) {
		return fmt.Errorf("%w: the model was loaded from there: name another one",
			backend.ErrArgument)
	}
	r := replacing{dir: in, main: configName, tensorsName: weightsName, tensors: tensors,
		texts: map[string][]byte{}, outdated: slices.Clone(outdated)}
	if r.text, err = m.configText(); err != nil {
		return err
	}
	for _, name := range besides {
		text, err := m.dir.Read(name, maxText)
		if err == nil {
			r.texts[name] = text
		} else if r.outdated = append(r.outdated, name); !errors.Is(err, fs.ErrNotExist) &&
			!errors.Is(err, files.ErrPointer) { // nobody could use that
			return err
		}
	}
	return r.write()
}

// configText returns config.json, which says whether there is a head.
func (m *Model) configText() ([]byte, error) {
	var was Config
	var o object
	if err := errors.Join(json.Unmarshal(m.text, &o), was.read(&o)); err != nil ||
		was.Tied == m.Tied {
		return m.text, err
	}
	all := map[string]json.RawMessage{}
	if err := json.Unmarshal(m.text, &all); err != nil {
		return nil, err
	}
	all["tie_word_embeddings"] = fmt.Append(nil, m.Tied)
	return json.MarshalIndent(all, "", "  ")
}

// same reports whether directories are one.
func same(a, b files.Dir) bool {
	x, err := a.Stat(".")
	y, wrong := b.Stat(".")
	return a.Path("") == b.Path("") || err == nil && wrong == nil && os.SameFile(x, y)
}

// replacing is a directory to write. Without the main file it has nothing that programs load.
type replacing struct {
	dir         files.Dir
	main        string
	text        []byte // of the main file
	tensorsName string
	tensors     map[string]safetensors.Tensor
	texts       map[string][]byte // of other files
	outdated    []string          // patterns of files that have to go
}

// write writes the files. If more than tensors changes, the main one is away until all others have
// been written; after an error before tensors are replaced it is there again.
func (r replacing) write() error {
	was, err := r.dir.Read(r.main, maxText)
	if errors.Is(err, fs.ErrNotExist) {
		if err = nil; r.dir.OnDisk() != "" {
			err = os.MkdirAll(r.dir.OnDisk(), 0o777)
		}
	}
	old, wrong := r.old()
	away := was != nil && (len(old) > 0 || !bytes.Equal(was, r.text) || r.changesTexts())
	if err = errors.Join(err, wrong); err == nil && away {
		err = r.remove(r.main)
	}
	if err != nil {
		return err
	}
	if err = r.dir.Replace(r.tensorsName, func(w io.Writer) error {
		return safetensors.Write(w, r.tensors, map[string]string{"format": "pt"})
	}); err != nil {
		if away {
			err = errors.Join(err, r.dir.Replace(r.main, files.Text(was)))
		}
		return err
	}
	err = r.remove(old...)
	for _, name := range slices.Sorted(maps.Keys(r.texts)) {
		if err == nil {
			err = r.dir.Replace(name, files.Text(r.texts[name]))
		}
	}
	if err == nil {
		err = r.dir.Replace(r.main, files.Text(r.text))
	}
	return err
}

// changesTexts reports whether a file of text is not there as it will be.
func (r replacing) changesTexts() bool {
	for name, text := range r.texts {
		was, err := r.dir.Read(name, maxText)
		if err != nil || !bytes.Equal(was, text) {
			return true
		}
	}
	return false
}

// old returns the files of the directory that have to go.
func (r replacing) old() (names []string, err error) {
	all, err := r.dir.ReadDir(".")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, pattern := range r.outdated {
		pattern = strings.ReplaceAll(pattern, "*", strings.Repeat("[0-9]", 5))
		for _, e := range all {
			if is, wrong := path.Match(pattern, e.Name()); is || wrong != nil {
				names, err = append(names, e.Name()), errors.Join(err, wrong)
			}
		}
	}
	return names, err
}

// remove removes files, which need not be there.
func (r replacing) remove(names ...string) (err error) {
	for _, name := range names {
		if removed := r.dir.Remove(name); !errors.Is(removed, fs.ErrNotExist) {
			err = errors.Join(err, removed)
		}
	}
	return errors.Join(err, r.dir.Sync("."))
}

// encode returns the tensors of a file for learnables: in the dtypes of the folder that was loaded,
// and in F32 for an adapter.
func (m *Model) encode(weights map[string]*tensor.Dense) (map[string]safetensors.Tensor, error) {
	tensors := map[string]safetensors.Tensor{}
	for _, learnable := range slices.Sorted(maps.Keys(weights)) {
		name, t, err := m.tensor(learnable, weights[learnable])
		if err != nil {
			return nil, fmt.Errorf("%s: %w", learnable, err)
		}
		tensors[name] = t
	}
	return tensors, nil
}

func (m *Model) tensor(learnable string, x *tensor.Dense) (name string, t safetensors.Tensor,
	err error) {
	if x == nil || x.Dims() == 0 {
		return "", t, fmt.Errorf("%w: it is nil or a scalar", backend.ErrArgument)
	}
	s, d := m.stored(learnable, x.Shape()), backend.F32
	if !strings.HasPrefix(s.name, adapterPrefix) {
		if s, err = m.find(learnable, x.Shape()); err != nil {
			return "", t, err
		}
		d, _, _ = s.file.Of(s.name)
	}
	own, _ := residence.DType(x.Dtype())
	elements, err := residence.Elements(x, own)
	if err = cmp.Or(err, residence.Present(elements)); err != nil {
		return "", t, err
	}
	values, err := numbers(elements)
	if err != nil {
		return "", t, err
	}
	if s.transposed {
		if values, err = transposed(values, s.shape[1], s.shape[0]); err != nil {
			return "", t, err
		}
	}
	t = safetensors.New(d, s.shape)
	if err := (kernels.Host{}).Cast(t.Data, values); err != nil {
		return "", t, err
	}
	return s.name, t, checkFinite(t, values)
}

// checkFinite returns an error for an element of a file's tensor that is not finite, given the
// values that were cast to its dtype.
func checkFinite(t safetensors.Tensor, values backend.Buffer) error {
	i := safetensors.NotFinite(t.Data, false)
	if i < 0 {
		return nil
	}
	x := make([]float64, 1)
	if err := (kernels.Host{}).Cast(backend.Of(x), values.Slice(i, i+1)); err != nil {
		return err
	}
	at := safetensors.Indices(i, t.Shape)
	if math.IsNaN(x[0]) || math.IsInf(x[0], 0) {
		return fmt.Errorf("%w: element %v is %v: the model has diverged: save an earlier "+
			"checkpoint", backend.ErrArgument, at, x[0])
	}
	return fmt.Errorf("%w: element %v is %v, more than %v can hold, which the folder has: "+
		"load the model from a folder in bf16 or f32, and save that", backend.ErrArgument, at, x[0],
		t.Data.DType())
}
