// Package safetensors reads and writes files of tensors in the format of Hugging Face: the length
// of a header in 8 bytes, little endian; the header in JSON, padded with spaces so that the data
// begin at a multiple of 8; and the data.
//
//	f, err := safetensors.Open(dir, "model.safetensors")
//	defer f.Close()
//	t, err := f.Read("wte.weight")
//
// A header is checked in full before memory is taken for data: the tensors cover the data without
// gaps and overlaps, and each has as many bytes as its shape and dtype want. So a hostile file
// costs at most its own size, which files.Open has compared with what the disk has.
//
// https://github.com/huggingface/safetensors
package safetensors

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
)

// Tensor is a tensor in host memory, whose elements are in row-major order.
type Tensor struct {
	Shape []int
	Data  backend.Buffer
	Other string // the dtype, of a tensor without Data, if package backend lacks it
}

// Header says where the tensors of a file are, and what their dtypes and shapes are.
type Header struct {
	Metadata map[string]string          // what the writer says besides
	Texts    map[string]json.RawMessage // of the tensors, as they stand in the file

	entries map[string]entry
	data    int64 // where the data begin
	nbytes  int64 // of the data
}

// entry is what the header says of a tensor. Offsets are in the data.
type entry struct {
	DType   string   `json:"dtype"`
	Shape   []int    `json:"shape"`
	Offsets [2]int64 `json:"data_offsets"`

	dtype backend.DType
}

const (
	// MetadataName is the entry of a header that is no tensor.
	MetadataName = "__metadata__"
	// maxHeader is how long a header may be, in bytes: of about 200,000 tensors. Other readers take
	// 100 MB; parsed, it has 20 times as many.
	maxHeader = 25_000_000
	// maxAxes is how many axes a tensor may have.
	maxAxes = 64
	// dataAlign is what the data begin at a multiple of.
	dataAlign = 8
	damaged   = "the file is damaged or not whole: take another copy"
)

// ReadHeader reads the header of a file of so many bytes, and checks it. What r reads next are the
// data.
func ReadHeader(r io.Reader, size int64) (*Header, error) {
	var prefix [8]byte
	if _, err := io.ReadFull(r, prefix[:]); err != nil {
		return nil, fmt.Errorf("no length of a header, %w: %s", err, damaged)
	}
	long := binary.LittleEndian.Uint64(prefix[:])
	if long > maxHeader || int64(long) > size-8 {
		return nil, fmt.Errorf("a header of %d bytes in a file of %d: %s", long, size, damaged)
	}
	text := make([]byte, long)
	if _, err := io.ReadFull(r, text); err != nil {
		return nil, err
	}
	h := &Header{entries: map[string]entry{}, data: 8 + int64(long), nbytes: size - 8 - int64(long)}
	if err := json.Unmarshal(text, &h.Texts); err != nil {
		return nil, fmt.Errorf("its header is not JSON, %w: %s", err, damaged)
	}
	if text, ok := h.Texts[MetadataName]; ok {
		delete(h.Texts, MetadataName)
		if err := json.Unmarshal(text, &h.Metadata); err != nil {
			return nil, fmt.Errorf("its %s: %w", MetadataName, err)
		}
	}
	return h, h.check()
}

// check parses the entries. They must cover the data, without overlap.
func (h *Header) check() error {
	var all []entry
	for name, text := range h.Texts {
		var e entry
		err := json.Unmarshal(text, &e)
		if err == nil {
			err = e.check(h.nbytes)
		}
		if err != nil {
			return fmt.Errorf("tensor %q: %w", name, err)
		}
		h.entries[name], all = e, append(all, e)
	}
	slices.SortFunc(all, entry.compare)
	at := int64(0)
	for _, e := range all {
		if e.Offsets[0] != at {
			return fmt.Errorf("a tensor begins at byte %d, and the one before ends at %d: %s",
				e.Offsets[0], at, damaged)
		}
		at = e.Offsets[1]
	}
	if at != h.nbytes {
		return fmt.Errorf("its tensors have %d bytes, and the file has %d for them: %s", at,
			h.nbytes, damaged)
	}
	return nil
}

// otherBits are the dtypes of the format that package backend lacks, with the length of an element.
// Who reads such a tensor gets an error; who does not need it reads the others.
var otherBits = map[string]int64{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8,
	"F8_E8M0": 8, "I8": 8, "I16": 16, "U16": 16, "U32": 32, "C64": 64, "U64": 64}

// compare orders entries as they lie in a file.
func (e entry) compare(o entry) int { return slices.Compare(e.Offsets[:], o.Offsets[:]) }

func (e *entry) check(nbytes int64) (err error) {
	from, to := e.Offsets[0], e.Offsets[1]
	if from < 0 || to < from || to > nbytes {
		return fmt.Errorf("it has bytes %d to %d, and the file has %d: %s", from, to, nbytes,
			damaged)
	}
	name := strings.ToLower(e.DType)
	if name == "bool" { // a byte each, such as the masks in files of GPT-2
		name = "u8"
	}
	bits, other := otherBits[e.DType]
	if !other {
		if e.dtype, err = backend.ParseDType(name); err != nil {
			return err
		}
		bits = 8 * int64(e.dtype.Size())
	}
	if len(e.Shape) > maxAxes {
		return fmt.Errorf("%d axes: at most %d", len(e.Shape), maxAxes)
	}
	if (to-from)*8%bits != 0 || !holds(e.Shape, (to-from)*8/bits) {
		return fmt.Errorf("%d bytes for a shape of %v %s", to-from, e.Shape, e.DType)
	}
	return nil
}

// holds reports whether a shape has n elements.
func holds(shape []int, n int64) bool {
	if slices.Contains(shape, 0) { // whatever the others are
		return n == 0 && slices.Min(shape) == 0
	}
	all := int64(1)
	for _, d := range shape {
		if d < 0 || all > n/int64(d) {
			return false
		}
		all *= int64(d)
	}
	return all == n
}

// DataBytes returns the length of the data.
func (h *Header) DataBytes() int64 { return h.nbytes }

// HeaderBytes returns the length of the header.
func (h *Header) HeaderBytes() int64 { return h.data }

// Names returns the names of the tensors, sorted.
func (h *Header) Names() []string { return slices.Sorted(maps.Keys(h.entries)) }

// Of returns dtype and shape of a tensor, and whether there is one of this name. The dtype is not
// valid if package backend lacks it.
func (h *Header) Of(name string) (d backend.DType, shape []int, ok bool) {
	e, ok := h.entries[name]
	return e.dtype, e.Shape, ok
}

// Each reads the data from r, and gives each tensor to take, in the order of the file.
func (h *Header) Each(r io.Reader, take func(name string, t Tensor)) error {
	names := h.Names()
	slices.SortStableFunc(names, func(a, b string) int {
		return h.entries[a].compare(h.entries[b])
	})
	for _, name := range names {
		e := h.entries[name]
		if !e.dtype.Valid() {
			if _, err := io.CopyN(io.Discard, r, e.Offsets[1]-e.Offsets[0]); err != nil {
				return fmt.Errorf("tensor %q: %w", name, err)
			}
			take(name, Tensor{Shape: e.Shape, Other: e.DType})
			continue
		}
		t := New(e.dtype, e.Shape)
		if _, err := io.ReadFull(r, t.Data.Bytes()); err != nil {
			return fmt.Errorf("tensor %q: %w", name, err)
		}
		take(name, t)
	}
	return nil
}

// New returns a tensor of zeros.
func New(d backend.DType, shape []int) Tensor {
	n := d.Size()
	for _, length := range shape {
		n *= length
	}
	words := backend.Of(make([]int64, (n+7)/8)) // so that elements are aligned
	return Tensor{Shape: shape, Data: words.As(backend.U8).Slice(0, n).As(d)}
}

// File is an open file, whose tensors are read one at a time.
type File struct {
	*Header
	path string
	f    files.File
	at   io.ReaderAt // f, or its bytes
	// mapped is the file in memory, after the first Map, if it can be mapped.
	mapped []byte
}

// Open opens a file and checks its header.
func Open(in files.Dir, name string) (*File, error) {
	f, err := in.Open(name)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil {
		var h *Header
		if h, err = ReadHeader(f, info.Size()); err == nil {
			return &File{Header: h, path: in.Path(name), f: f, at: f}, nil
		}
	}
	f.Close()
	return nil, fmt.Errorf("%s: %w", in.Path(name), err)
}

// Name returns the path or the URL of the file.
func (f *File) Name() string { return f.path }

// Close closes the file.
func (f *File) Close() error { return f.f.Close() }

// ReadAt reads bytes of the file that was opened, whatever has its name since.
func (f *File) ReadAt(p []byte, at int64) (n int, err error) { return f.at.ReadAt(p, at) }

// Keep takes the file into memory, and closes it: others may replace it then, on Windows, too.
func (f *File) Keep() error {
	whole, err := io.ReadAll(io.NewSectionReader(f.f, 0, f.data+f.nbytes))
	f.at = bytes.NewReader(whole)
	return errors.Join(err, f.Close())
}

// find returns where a tensor is, which the header has.
func (f *File) find(name string) (entry, error) {
	e, ok := f.entries[name]
	if !ok {
		return e, fmt.Errorf("%s has no tensor %q", f.path, name)
	}
	if !e.dtype.Valid() {
		return e, fmt.Errorf("%w: in %s tensor %q is of %.20s: use one of %v",
			backend.ErrUnsupported, f.path, name, e.DType, backend.DTypes())
	}
	return e, nil
}

// Map is Read of a tensor where it lies, in the memory of a mapped file, which can only be read and
// stays mapped while the process lives: so it costs nothing before somebody looks at it. It reads
// a file that cannot be mapped. See files.Map for one that is cut off.
func (f *File) Map(name string) (Tensor, error) {
	e, err := f.find(name)
	if err != nil {
		return Tensor{}, err
	}
	if f.mapped == nil && f.at == io.ReaderAt(f.f) {
		if info, err := f.f.Stat(); err != nil || info.Size() != f.data+f.nbytes {
			return Tensor{}, fmt.Errorf("%s had %d bytes when it was opened, and has others now: "+
				"replace files by renaming others", f.path, f.data+f.nbytes)
		}
		f.mapped = files.Map(f.f, f.data+f.nbytes)
	}
	if f.mapped == nil || (f.data+e.Offsets[0])%int64(e.dtype.Size()) != 0 {
		return f.Read(name)
	}
	data := backend.Of(f.mapped).Slice(int(f.data+e.Offsets[0]), int(f.data+e.Offsets[1]))
	return Tensor{Shape: e.Shape, Data: data.As(e.dtype)}, nil
}

// Read reads a tensor, which the header has.
func (f *File) Read(name string) (Tensor, error) {
	e, err := f.find(name)
	if err != nil {
		return Tensor{}, err
	}
	t := New(e.dtype, e.Shape)
	if _, err := f.ReadAt(t.Data.Bytes(), f.data+e.Offsets[0]); err != nil {
		return Tensor{}, fmt.Errorf("%s: tensor %q: %w", f.path, name, err)
	}
	return t, nil
}

// Layout returns the texts of tensors in a header, if their data follow each other in the order of
// their names. It looks at their dtypes and shapes alone.
func Layout(tensors map[string]Tensor) (map[string]json.RawMessage, error) {
	texts, at := map[string]json.RawMessage{}, int64(0)
	for _, name := range slices.Sorted(maps.Keys(tensors)) {
		t := tensors[name]
		to := at + t.NBytes()
		text, err := json.Marshal(entry{DType: strings.ToUpper(t.Data.DType().String()),
			Shape: t.Shape, Offsets: [2]int64{at, to}})
		if err != nil {
			return nil, err
		}
		texts[name], at = text, to
	}
	return texts, nil
}

// Declared returns a tensor without elements, for Layout and Begin.
func Declared(d backend.DType, shape []int) Tensor {
	return Tensor{Shape: shape, Data: New(d, []int{0}).Data}
}

// NBytes returns how many bytes a tensor of its dtype and shape has.
func (t Tensor) NBytes() int64 {
	n := int64(t.Data.DType().Size())
	for _, length := range t.Shape {
		n *= int64(length)
	}
	return n
}

// Begin returns the beginning of a file of tensors, and what is said of them besides. Their data
// follow in the order of their names.
func Begin(tensors map[string]Tensor, metadata map[string]string) ([]byte, error) {
	header, err := Layout(tensors)
	if err == nil && metadata != nil {
		header[MetadataName], err = json.Marshal(metadata)
	}
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(header)
	for len(text)%dataAlign != 0 {
		text = append(text, ' ')
	}
	return append(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text...), err
}

// Write writes tensors, and what is said of them besides. An error is one of w.
func Write(w io.Writer, tensors map[string]Tensor, metadata map[string]string) error {
	begin, err := Begin(tensors, metadata)
	if err == nil {
		_, err = w.Write(begin)
	}
	for _, name := range slices.Sorted(maps.Keys(tensors)) {
		if err == nil {
			_, err = w.Write(tensors[name].Data.Bytes())
		}
	}
	return err
}
