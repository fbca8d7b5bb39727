package models

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/safetensors"
	"github.com/euryale-ml/euryale/kernels"
)

const (
	weightsName = "model.safetensors"
	indexName   = weightsName + ".index.json"
	// maxIndex is the most bytes of an index. Those of models of 1,000 layers have 2 MB.
	maxIndex = 64 << 20
)

// located is the file of each tensor, by name.
type located map[string]*safetensors.File

// missing returns the first name that is not among others, "" if there is none.
func missing[T, U any](all map[string]T, others map[string]U) string {
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if _, ok := others[name]; !ok {
			return name
		}
	}
	return ""
}

// allUsed returns an error for a tensor that is not among used.
func (l located) allUsed(used map[string]bool, config string) error {
	if name := missing(l, used); name != "" {
		return fmt.Errorf("%w: %s has %s, and by %s there is none", backend.ErrArgument,
			l[name].Name(), name, config)
	}
	return nil
}

// openWeights opens the files of the folder, and checks their headers. As in transformers,
// model.safetensors comes first: Save may have written it beside older files.
func (m *Model) openWeights() (located, error) {
	all := located{}
	alone := m.open(filepath.Join(m.dir, weightsName), all)
	if !errors.Is(alone, fs.ErrNotExist) {
		return all, alone
	}
	var index struct {
		Files map[string]string `json:"weight_map"` // by tensor
	}
	path := filepath.Join(m.dir, indexName)
	if _, err := readJSON(path, maxIndex, &index); errors.Is(err, fs.ErrNotExist) {
		return nil, absent(alone, "save_pretrained of transformers writes it")
	} else if err != nil {
		return nil, err
	}
	for _, name := range slices.Compact(slices.Sorted(maps.Values(index.Files))) {
		if name != filepath.Base(name) || !filepath.IsLocal(name) {
			return nil, fmt.Errorf("%s names %q: files are beside it", path, name)
		}
		if err := m.open(filepath.Join(m.dir, name), all); err != nil {
			return nil, err
		}
	}
	for of, name := range index.Files {
		if at := all[of]; at == nil || filepath.Base(at.Name()) != name {
			return nil, fmt.Errorf("%s says that %s has %s, and it has not", indexName, name, of)
		}
	}
	return all, nil
}

// open opens a file, and adds its tensors to all.
func (m *Model) open(path string, all located) error {
	file, err := safetensors.Open(path)
	if err != nil {
		return err
	}
	m.files = append(m.files, file)
	for _, name := range file.Names() {
		if other := all[name]; other != nil {
			return fmt.Errorf("%s and %s both have %s", other.Name(), path, name)
		}
		all[name] = file
	}
	return nil
}

// readJSON reads a file of at most so many bytes, and returns its text, too.
func readJSON(path string, most int, to any) (text []byte, err error) {
	if text, err = files.Read(path, most); err != nil {
		return nil, err // which names the file
	}
	if err = json.Unmarshal(text, to); err != nil {
		err = fmt.Errorf("%s is damaged: %w: take another copy", path, err)
	}
	return text, err
}

// ignored reports whether a tensor of a file is not part of the model: tables that older versions
// of transformers have saved, or a second copy of the embedding.
func (m *Model) ignored(name string, _ *safetensors.File) bool {
	return m.Tied && name == headName || strings.HasSuffix(name, ".attn.bias") ||
		strings.HasSuffix(name, ".attn.masked_bias") ||
		strings.HasSuffix(name, ".rotary_emb.inv_freq")
}

// values returns the elements of a learnable, of its whole shape, and notes the tensor.
func (m *Model) values(learnable string, shape []int, used map[string]bool) (x backend.Buffer,
	err error) {
	s, err := m.find(learnable, shape)
	if err != nil {
		return x, err
	}
	used[s.name] = true
	t, err := s.file.Read(s.name)
	if err != nil {
		return x, err
	}
	if s.transposed {
		t.Data, err = transposed(t.Data, s.shape[0], s.shape[1])
	}
	if err == nil {
		x, err = numbers(t.Data)
	}
	if err != nil {
		return x, fmt.Errorf("%s: %w", s.name, err)
	}
	return x, nil
}

// stored says how a file stores a learnable.
type stored struct {
	name       string
	shape      []int
	transposed bool              // a matrix that is [out, in] there, and [in..., out...] here
	file       *safetensors.File // after find
}

// stored returns how the files store a learnable of a shape.
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
	all, lacking, config := m.weights, "no file has", configName
	if isAdapter(learnable) {
		all, lacking, config = m.adapter, adapterName+" has no", adapterConfigName
	}
	if s.file = all[s.name]; s.file == nil { // in older files, perhaps
		s.name = strings.TrimPrefix(s.name, gpt2Prefix)
		s.file = all[s.name]
	}
	if s.file == nil {
		return s, fmt.Errorf("%w: %s %s of %s", backend.ErrArgument, lacking, s.name, config)
	}
	if _, is, _ := s.file.Of(s.name); !slices.Equal(is, s.shape) {
		return s, fmt.Errorf("%w: %s has shape %v in %s, and by %s it is %v", backend.ErrArgument,
			s.name, is, s.file.Name(), config, s.shape)
	}
	return s, nil
}

// numbers returns the elements of a buffer of floats as F32, or F64 if they are.
func numbers(b backend.Buffer) (backend.Buffer, error) {
	switch b.DType() {
	case backend.F64, backend.F32:
		return b, nil
	case backend.F16, backend.BF16:
		x := backend.Of(make([]float32, b.Len()))
		return x, kernels.Host{}.Cast(x, b)
	}
	return b, fmt.Errorf("%w: weights of %v: use f32, f16 or bf16", backend.ErrUnsupported,
		b.DType())
}

// transposed returns a matrix of rows and columns, transposed by all cores: a Llama of 1 B took
// most of its time to load here.
func transposed(x backend.Buffer, rows, columns int) (backend.Buffer, error) {
	y := safetensors.New(x.DType(), []int{columns, rows}).Data
	errs := make([]error, runtime.GOMAXPROCS(0))
	var moving sync.WaitGroup
	for i := range errs {
		from, to := i*columns/len(errs), (i+1)*columns/len(errs)
		moving.Go(func() {
			errs[i] = kernels.Host{}.CopyStrided(y.Slice(from*rows, to*rows),
				x.Slice(from, x.Len()), []int{to - from, rows}, []int{1, columns})
		})
	}
	moving.Wait()
	return y, errors.Join(errs...)
}
