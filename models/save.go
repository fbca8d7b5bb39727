package models

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"

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
// It is not collective: call it on one rank. The directory may exist. Each file takes the place of
// an old one when it is on the disk; then the index and the numbered files of a model that was
// there are removed.
//
// Cost: the model's memory twice. Errors: [backend.ErrArgument] for learnables that are missing,
// unknown or of another shape, and for the folder that the model was loaded from; those of the file
// system.
func (m *Model) Save(dir string, weights map[string]*tensor.Dense) (err error) {
	defer named(&err, "save", dir)
	tensors := map[string]safetensors.Tensor{}
	for _, learnable := range slices.Sorted(maps.Keys(weights)) {
		name, t, err := m.tensor(learnable, weights[learnable])
		if err != nil {
			return fmt.Errorf("%s: %w", learnable, err)
		}
		tensors[name] = t
	}
	written := map[string]bool{}
	for name := range tensors {
		written[name] = true
	}
	if name := m.first(written); name != "" {
		return fmt.Errorf("%w: there is no %s among the weights: give all learnables",
			backend.ErrArgument, name)
	}
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return err
	}
	switch same, err := sameDir(dir, m.dir); {
	case err != nil:
		return err
	case same:
		return fmt.Errorf("%w: the model was loaded from there: name another one",
			backend.ErrArgument)
	}
	for _, name := range besides {
		text, err := os.ReadFile(filepath.Join(m.dir, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			err = files.ReplaceWith(filepath.Join(dir, name), text)
		}
		if err != nil {
			return err
		}
	}
	err = saveTensors(filepath.Join(dir, weightsName), tensors)
	if err == nil {
		err = files.ReplaceWith(filepath.Join(dir, configName), m.text)
	}
	if err != nil {
		return err
	}
	return removeShards(dir)
}

// saveTensors writes a file as transformers does.
func saveTensors(path string, tensors map[string]safetensors.Tensor) error {
	return files.Replace(path, func(w io.Writer) error {
		return safetensors.Write(w, tensors, map[string]string{"format": "pt"})
	})
}

// removeShards removes the files of another model, of which the one that was written takes the
// place: programs that read all of them would mix both. Those of transformers' names go, and the
// index first.
func removeShards(dir string) error {
	all, err := os.ReadDir(dir)
	names := []string{indexName}
	for _, e := range all {
		if shards.MatchString(e.Name()) {
			names = append(names, e.Name())
		}
	}
	for _, name := range names {
		if removed := os.Remove(filepath.Join(dir, name)); !errors.Is(removed, fs.ErrNotExist) {
			err = errors.Join(err, removed)
		}
	}
	return errors.Join(err, files.SyncDir(dir))
}

// shards are the names of the files of an index.
var shards = regexp.MustCompile(`^model-\d{5}-of-\d{5}\.safetensors$`)

// tensor returns name and tensor in a file of a learnable.
func (m *Model) tensor(learnable string, x *tensor.Dense) (string, safetensors.Tensor, error) {
	var t safetensors.Tensor
	if x == nil || x.Dims() == 0 {
		return "", t, fmt.Errorf("%w: it is nil or a scalar", backend.ErrArgument)
	}
	name, at, want, err := m.find(learnable, x.Shape())
	if err != nil {
		return "", t, err
	}
	d, _, _ := at.Of(name)
	t, err = encoded(x, d, want, m.transposed(learnable))
	return name, t, err
}

// encoded returns a tensor of floats as it is in a file: of another dtype and shape, and transposed
// if it is so.
func encoded(x *tensor.Dense, d backend.DType, shape []int, turned bool) (t safetensors.Tensor,
	err error) {
	own, _ := residence.DType(x.Dtype())
	elements, err := residence.Elements(x, own)
	if err != nil {
		return t, err
	}
	values, err := numbers(elements)
	if err != nil {
		return t, err
	}
	if turned {
		values = transpose(values, shape[1], shape[0])
	}
	t = safetensors.New(d, shape)
	return t, kernels.Host{}.Cast(t.Data, backend.Of(values))
}

// sameDir reports whether two directories are one.
func sameDir(a, b string) (bool, error) {
	x, err := os.Stat(a)
	if err != nil {
		return false, err
	}
	y, err := os.Stat(b)
	if err != nil {
		return false, err
	}
	return os.SameFile(x, y), nil
}
