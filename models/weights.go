package models

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/safetensors"
	"github.com/euryale-ml/euryale/kernels"
)

const (
	weightsName = "model.safetensors"
	indexName   = weightsName + ".index.json"
	// maxIndex is how long an index may be. Those of models of 1,000 layers have 2 MB.
	maxIndex = 64 << 20
)

// folder is the open files of a model's weights.
type folder struct {
	files []*safetensors.File
	at    map[string]*safetensors.File // by tensor
}

// openFolder opens the files of a folder, and checks their headers.
func openFolder(dir string) (*folder, error) {
	f := &folder{at: map[string]*safetensors.File{}}
	names, listed, err := weightFiles(dir)
	for _, name := range names {
		if err == nil {
			err = f.open(filepath.Join(dir, name))
		}
	}
	for tensor, name := range listed {
		if err != nil {
			break
		}
		if at := f.at[tensor]; at == nil || filepath.Base(at.Name()) != name {
			err = fmt.Errorf("%s says that %s has %s, and it has not", indexName, name, tensor)
		}
	}
	if err != nil {
		return nil, errors.Join(err, f.close())
	}
	return f, nil
}

// weightFiles returns the files of a folder, and what the index says, by tensor, if it is read. As
// in transformers, model.safetensors comes first: Save may have written it beside older files.
func weightFiles(dir string) (names []string, listed map[string]string, err error) {
	if _, err := os.Stat(filepath.Join(dir, weightsName)); err == nil {
		return []string{weightsName}, nil, nil
	}
	path := filepath.Join(dir, indexName)
	text, err := files.Read(path, maxIndex)
	if errors.Is(err, fs.ErrNotExist) {
		return []string{weightsName}, nil, nil
	}
	var index struct {
		Map map[string]string `json:"weight_map"`
	}
	if err == nil {
		err = json.Unmarshal(text, &index)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	names = slices.Compact(slices.Sorted(maps.Values(index.Map)))
	for _, name := range names {
		if name != filepath.Base(name) || !filepath.IsLocal(name) {
			return nil, nil, fmt.Errorf("%s names %q: files are beside it", path, name)
		}
	}
	return names, index.Map, nil
}

// open opens one of the files.
func (f *folder) open(path string) error {
	file, err := safetensors.Open(path)
	if err != nil {
		return err
	}
	f.files = append(f.files, file)
	for _, name := range file.Names() {
		if other := f.at[name]; other != nil {
			return fmt.Errorf("%s and %s both have %s", other.Name(), path, name)
		}
		f.at[name] = file
	}
	return nil
}

func (f *folder) close() error {
	var errs []error
	for _, file := range f.files {
		errs = append(errs, file.Close())
	}
	return errors.Join(errs...)
}

// numbers returns the elements of a buffer of floats.
func numbers(b backend.Buffer) ([]float64, error) {
	switch b.DType() {
	case backend.F64, backend.F32, backend.F16, backend.BF16:
		x := make([]float64, b.Len())
		return x, kernels.Host{}.Cast(backend.Of(x), b)
	}
	return nil, fmt.Errorf("%w: weights of %v: use f32, f16 or bf16", ErrUnsupported, b.DType())
}

// ignored reports whether a tensor of a file is none of the model: tables that older versions of
// transformers have saved.
func ignored(name string) bool {
	for _, end := range []string{".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"} {
		if strings.HasSuffix(name, end) {
			return true
		}
	}
	return false
}
