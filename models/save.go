package models

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/safetensors"
	"github.com/euryale-ml/euryale/kernels"
)

// besides are the files of a folder that are copied as they are.
var besides = []string{"generation_config.json", "tokenizer.json", "tokenizer_config.json",
	"special_tokens_map.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja"}

// Save writes a folder that Load and transformers read: the model with other weights, in the dtypes
// of the folder that was loaded, its configuration and its tokenizer. weights are whole learnables
// by name, such as those of a checkpoint, whatever the layout that wrote it:
//
//	weights, err := autograd.ReadWeights(checkpoints)
//	err = m.Save("tuned", weights)
//
// It is not collective: call it on one rank. The directory may exist. Each file replaces an old one
// when it is on the disk; then Save removes the index and the numbered files of an earlier model.
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
	if name := missing(m.weights, tensors); name != "" {
		return fmt.Errorf("%w: there is no %s among the weights: give all learnables",
			backend.ErrArgument, name)
	}
	if name := missing(tensors, m.weights); name != "" {
		return fmt.Errorf("%w: %s is among the weights, but the model has no such weight: leave "+
			"it out", backend.ErrArgument, name)
	}
	from, err := os.Stat(m.dir)
	if err != nil {
		return err
	}
	if to, err := os.Stat(dir); err == nil && os.SameFile(to, from) {
		return fmt.Errorf("%w: the model was loaded from there: name another one",
			backend.ErrArgument)
	}
	texts := map[string][]byte{configName: m.text}
	for _, name := range besides {
		text, err := os.ReadFile(filepath.Join(m.dir, name))
		if err == nil {
			texts[name] = text
		} else if !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if err := write(dir, weightsName, tensors, texts); err != nil {
		return err
	}
	return removeShards(dir)
}

// write writes files to a directory: one of tensors, as transformers does, and then texts.
func write(dir, name string, tensors map[string]safetensors.Tensor, texts map[string][]byte) error {
	err := os.MkdirAll(dir, 0o777)
	if err == nil {
		err = files.Replace(filepath.Join(dir, name), func(w io.Writer) error {
			return safetensors.Write(w, tensors, map[string]string{"format": "pt"})
		})
	}
	for _, name := range slices.Sorted(maps.Keys(texts)) {
		if err == nil {
			err = files.ReplaceWith(filepath.Join(dir, name), texts[name])
		}
	}
	return err
}

// removeShards removes the files of an earlier model that the new one replaces: programs that read
// all files would mix both. It removes those with transformers' names, the index first.
func removeShards(dir string) error {
	number := strings.Repeat("[0-9]", 5)
	shards, err := fs.Glob(os.DirFS(dir), "model-"+number+"-of-"+number+".safetensors")
	for _, name := range append([]string{indexName}, shards...) {
		if removed := os.Remove(filepath.Join(dir, name)); !errors.Is(removed, fs.ErrNotExist) {
			err = errors.Join(err, removed)
		}
	}
	return errors.Join(err, files.SyncDir(dir))
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
	if !isAdapter(learnable) {
		if s, err = m.find(learnable, x.Shape()); err != nil {
			return "", t, err
		}
		d, _, _ = s.file.Of(s.name)
	}
	own, _ := residence.DType(x.Dtype())
	elements, err := residence.Elements(x, own)
	if err != nil {
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
