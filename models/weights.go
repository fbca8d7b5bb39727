package models

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math"
	"path/filepath"
	"slices"
	"strings"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/safetensors"
)

const (
	weightsName = "model.safetensors"
	indexName   = weightsName + ".index.json"
	// maxHeaders is the most bytes of the headers of all files.
	maxHeaders = 64 << 20
	// maxIndex is the most bytes of an index. Those of models of 1,000 layers have 2 MB.
	maxIndex = 64 << 20
)

// located is the file of each tensor, by name.
type located map[string]*safetensors.File

// Fingerprint returns a hash of parts of the files of weights, which those of another model do not
// share. A checkpoint of an adapter's training lacks these weights: keep it there, and compare.
//
// Cost: up to 3 MiB of each file are read, as they were opened. Errors: those of the file system.
func (m *Model) Fingerprint() (string, error) {
	const part = 1 << 20
	h := sha256.New()
	for _, file := range m.files {
		size := file.HeaderBytes() + file.DataBytes()
		for _, at := range []int64{0, size / 2, max(0, size-part)} {
			if _, err := io.Copy(h, io.NewSectionReader(file, at, part)); err != nil {
				return "", fmt.Errorf("models: fingerprint of %s: %w", file.Name(), err)
			}
		}
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// lacking returns the first name that is not among others, "" if there is none.
func lacking[T, U any](all map[string]T, others map[string]U) string {
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if _, ok := others[name]; !ok {
			return name
		}
	}
	return ""
}

// allUsed returns an error for a tensor that is not among used.
func (l located) allUsed(used map[string]bool, config string) error {
	if name := lacking(l, used); name != "" {
		return fmt.Errorf("%w: %s has %s, and by %s there is none", backend.ErrArgument,
			l[name].Name(), name, config)
	}
	return nil
}

// openWeights opens the files of the folder, and checks their headers. As in transformers,
// model.safetensors comes first: Save may have written it beside older files.
func (m *Model) openWeights() (located, error) {
	all := located{}
	alone := m.open(weightsName, all)
	if !errors.Is(alone, fs.ErrNotExist) {
		return all, alone
	}
	var index struct {
		Files map[string]string `json:"weight_map"` // by tensor
	}
	if _, err := m.dir.ReadJSON(indexName, maxIndex, &index); errors.Is(err, fs.ErrNotExist) {
		alone = unread(alone, m.dir, "pytorch_model.bin", "pytorch_model.bin.index.json")
		return nil, absent(alone, "save_pretrained of transformers writes it")
	} else if err != nil {
		return nil, err
	}
	for _, name := range slices.Compact(slices.Sorted(maps.Values(index.Files))) {
		if name != filepath.Base(name) || !filepath.IsLocal(name) {
			return nil, fmt.Errorf("%s names %q: files are beside it", m.dir.Path(indexName), name)
		}
		if err := m.open(name, all); err != nil {
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
func (m *Model) open(name string, all located) error {
	file, err := safetensors.Open(m.dir, name)
	if err != nil {
		return err
	}
	m.files = append(m.files, file)
	if m.headers += file.HeaderBytes(); m.headers > maxHeaders {
		return fmt.Errorf("%s: the headers of all files have more than %d bytes", file.Name(),
			maxHeaders)
	}
	for _, name := range file.Names() {
		if other := all[name]; other != nil {
			return fmt.Errorf("%s and %s both have %s", other.Name(), file.Name(), name)
		}
		all[name] = file
	}
	return nil
}

// unread adds to the error for a missing file that there is one in the format of Python.
func unread(err error, in files.Dir, names ...string) error {
	for _, name := range names {
		if _, is := in.Stat(name); is == nil {
			return fmt.Errorf("%w: the folder has %s, a format that can run programs and is not "+
				"read: load it in Python and call save_pretrained", err, name)
		}
	}
	return err
}

// canonical returns the name of a tensor in files of a whole model: there are files of models
// without a head, whose names lack the prefix.
func (m *Model) canonical(name string) string {
	prefix := llamaPrefix
	if m.Type == gpt2 {
		prefix = gpt2Prefix
	}
	if name == headName || strings.HasPrefix(name, prefix) {
		return name
	}
	return prefix + name
}

// leaveOut removes from the weights what is shown to be redundant: masks and angles that older
// versions of transformers have saved, and a head that equals the embedding. Another head is one.
func (m *Model) leaveOut() error {
	for _, name := range slices.Sorted(maps.Keys(m.weights)) {
		is, err := m.redundant(name)
		if err != nil {
			return err
		}
		if is {
			delete(m.weights, name)
		}
	}
	head, embedding := m.weights[headName], m.fileOf(m.embedding())
	if !m.Tied || head == nil || embedding.file == nil || embedding.name == headName {
		return nil
	}
	same, err := equal(stored{name: headName, file: head}, embedding)
	if same {
		delete(m.weights, headName)
	}
	m.Tied = same
	return err
}

// equal reports whether tensors have the same shape and numbers. Those of another shape are not
// read.
func equal(a, b stored) (bool, error) {
	_, shape, _ := a.file.Of(a.name)
	if _, other, _ := b.file.Of(b.name); !slices.Equal(shape, other) {
		return false, nil
	}
	x, err := a.file.Map(a.name)
	y, wrong := b.file.Map(b.name)
	if err = errors.Join(err, wrong); err != nil {
		return false, err
	}
	if x.Data.DType() != y.Data.DType() {
		x.Data, err = numbers(x.Data)
		y.Data, wrong = numbers(y.Data)
	}
	return err == nil && wrong == nil && x.Data.DType() == y.Data.DType() &&
		bytes.Equal(x.Data.Bytes(), y.Data.Bytes()), nil
}

// largestMask is the most elements of a tensor that is looked at: GPT-2 has 1,024 positions.
const largestMask = 4096 * 4096

// redundant reports whether a tensor is a causal mask, the number that GPT-2 had for hidden scores,
// or the angles of rotary positions.
func (m *Model) redundant(name string) (bool, error) {
	mask, hidden := strings.HasSuffix(name, ".attn.bias"), strings.HasSuffix(name, ".masked_bias")
	angles := strings.HasSuffix(name, ".rotary_emb.inv_freq")
	if !(m.Type == gpt2 && (mask || hidden)) && !(m.Type != gpt2 && angles) {
		return false, nil
	}
	if _, shape, _ := m.weights[name].Of(name); tensor.ProdInts(shape) >
		max(largestMask, m.Positions*m.Positions) {
		return false, nil
	}
	t, err := m.weights[name].Read(name)
	if err != nil {
		return false, err
	}
	is := make([]float64, t.Data.Len())
	if t.Data.DType() == backend.U8 { // or booleans
		for i, v := range t.Data.Bytes() {
			is[i] = float64(v)
		}
	} else if err := (kernels.Host{}).Cast(backend.Of(is), t.Data); err != nil {
		return false, fmt.Errorf("%s: %w", name, err)
	}
	switch {
	case hidden:
		return len(is) == 1 && is[0] <= -1e4, nil
	case mask:
		return causal(is, m.Positions), nil
	}
	plain := rotary{Kind: "default", Base: m.rotary.Base, Factor: 1}
	return near(is, m.rotary.angles(m.HeadWidth, 0)) || near(is, plain.angles(m.HeadWidth, 0)), nil
}

// causal reports whether numbers are a matrix that has 1 for each position and those before it.
func causal(x []float64, positions int) bool {
	for at, v := range x {
		if visible := at%positions <= at/positions; v != 0 && v != 1 || (v == 1) != visible {
			return false
		}
	}
	return len(x) == positions*positions
}

// near reports whether numbers are angles, up to a rounding to bf16.
func near(x []float64, angles []float32) bool {
	if len(x) != len(angles) {
		return false
	}
	for i, a := range angles {
		if !(math.Abs(x[i]-float64(a)) <= float64(a)/128) {
			return false
		}
	}
	return true
}

// values returns the elements of a learnable, of its whole shape, and how many of its first axes
// are behind the others; it notes the tensor. Those of 16 bits stay in the file.
func (m *Model) values(learnable string, shape []int, used map[string]bool) (x backend.Buffer,
	behind int, err error) {
	s, err := m.find(learnable, shape)
	if err != nil {
		return x, 0, err
	}
	used[s.name] = true
	if m.adapter != nil && m.adapter.replaced[nameOf(learnable)] != "" { // by the adapter's
		used[m.fileOf(nameOf(learnable)).name] = true
	}
	read := s.file.Read
	if d, _, _ := s.file.Of(s.name); d.Size() == 2 {
		read = s.file.Map
	}
	t, err := read(s.name)
	if err == nil && !t.Data.DType().Float() {
		err = fmt.Errorf("%s: %w: weights of %v: use f32, f16 or bf16", s.name,
			backend.ErrUnsupported, t.Data.DType())
	}
	return t.Data, s.behind, err
}

// stored says how a file stores a learnable.
type stored struct {
	name       string
	shape      []int
	transposed bool              // a matrix that is [out, in] there, and [in..., out...] here
	behind     int               // the axes of in, which are behind those of out there
	file       *safetensors.File // after find
}

// nameOf returns the name of a learnable's tensor.
func nameOf(learnable string) string {
	if layer, ok := strings.CutSuffix(learnable, ".gain"); ok {
		return layer + ".weight"
	}
	return learnable
}

// stored returns how the files store a learnable of a shape.
func (m *Model) stored(learnable string, shape []int) stored {
	s := stored{name: nameOf(learnable), shape: shape}
	of := strings.TrimSuffix(s.name, ".weight")
	in := 1 // of the axes are the input of a linear layer
	switch {
	case s.name != learnable: // a gain
	case strings.HasSuffix(learnable, ".bias"):
		s.shape = []int{tensor.ProdInts(shape)}
	default:
		if strings.HasSuffix(of, loraA) {
			in = len(shape) - 1
		} else if strings.HasSuffix(of, ".attn.c_proj") || strings.HasSuffix(of, ".o_proj") {
			in = min(2, len(shape)) // heads, and their elements
		}
		s.shape = []int{tensor.ProdInts(shape[:in]), tensor.ProdInts(shape[in:])}
		s.transposed = isAdapter(learnable) || m.Type != gpt2 && strings.HasSuffix(of, "_proj")
	}
	if s.transposed {
		s.behind = in
		slices.Reverse(s.shape)
	}
	if isAdapter(learnable) {
		s.name = adapterPrefix + learnable
	} else if m.adapter != nil && m.adapter.replaced[s.name] != "" {
		s.name = adapterPrefix + m.adapter.replaced[s.name]
	}
	return s
}

// fileOf returns the name of a tensor in the files, and its file, nil if there is none. The
// embedding and the head of a model that ties them stand for each other.
func (m *Model) fileOf(name string) stored {
	short := func(name string) string {
		return strings.TrimPrefix(strings.TrimPrefix(name, gpt2Prefix), llamaPrefix)
	}
	names := []string{name, short(name)}
	if m.Tied && name == m.embedding() {
		names = append(names, headName)
	} else if m.Tied && name == headName {
		names = append(names, m.embedding(), short(m.embedding()))
	}
	for _, n := range names {
		if file := m.weights[n]; file != nil {
			return stored{name: n, file: file}
		}
	}
	return stored{name: name}
}

// find is stored with the file.
func (m *Model) find(learnable string, shape []int) (stored, error) {
	s := m.stored(learnable, shape)
	lacking, config := "no file has", configName
	if strings.HasPrefix(s.name, adapterPrefix) {
		lacking, config = adapterName+" has no", adapterConfigName
		s.file = m.adapter.tensors[s.name]
	} else {
		at := m.fileOf(s.name)
		s.name, s.file = at.name, at.file
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
