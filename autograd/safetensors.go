package autograd

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/autograd/internal/checkpoint"
	"github.com/euryale-ml/euryale/backend"
)

// A safetensors file is the length of a header in 8 bytes, little endian; the
// header in JSON, padded with spaces so that the data begin at a multiple of 8; and
// the data. https://github.com/huggingface/safetensors
//
// The metadata of the header contains a checksum, which other readers ignore. Files of other
// writers need not have one.

// stored is a tensor in a file.
type stored struct {
	shape []int
	data  backend.Buffer // host memory
}

// entry is what the header says of a tensor. Offsets are in the data.
type entry struct {
	DType   string `json:"dtype"`
	Shape   []int  `json:"shape"`
	Offsets [2]int `json:"data_offsets"`
}

// remarks are the metadata, the entry of the header that is not a tensor; remarksName is its name.
type remarks struct {
	Checksum string `json:"crc32c,omitempty"` // of the entries, by name, and the data
	Save     string `json:"save,omitempty"`   // the id of the checkpoint that the file belongs to
	Step     string `json:"step,omitempty"`   // of that checkpoint
}

const remarksName = "__metadata__"

// checksum begins the checksum of a file; the data are to follow.
func checksum(entries map[string]json.RawMessage) hash.Hash32 {
	h := checkpoint.NewChecksum()
	for _, name := range slices.Sorted(maps.Keys(entries)) {
		io.WriteString(h, name)
		h.Write(entries[name])
	}
	return h
}

func damaged(is, written string) error {
	return fmt.Errorf("its checksum is %s, it was written with %s: the file is damaged, load "+
		"another checkpoint", is, written)
}

// vector returns a tensor of one axis.
func vector(b backend.Buffer) stored { return stored{[]int{b.Len()}, b} }

// writeTensors writes tensors to a file, by name, with what is said of them.
func writeTensors(
	path string, tensors map[string]stored, said remarks,
) (f checkpoint.File, err error) {
	names := slices.Sorted(maps.Keys(tensors))
	header, at := map[string]json.RawMessage{}, 0
	for _, name := range names {
		if err := checkName(name); err != nil {
			return f, fmt.Errorf("tensor %q: %w", name, err)
		}
		t := tensors[name]
		text, err := json.Marshal(entry{strings.ToUpper(t.data.DType().String()), t.shape,
			[2]int{at, at + t.data.NBytes()}})
		if err != nil {
			return f, err
		}
		header[name] = text
		at += t.data.NBytes()
	}
	sum := checksum(header)
	for _, name := range names {
		sum.Write(tensors[name].data.Bytes())
	}
	said.Checksum = checkpoint.Text(sum)
	text, err := json.Marshal(said)
	if err != nil {
		return f, err
	}
	header[remarksName] = text
	if text, err = json.Marshal(header); err != nil {
		return f, err
	}
	for len(text)%8 != 0 {
		text = append(text, ' ')
	}
	return checkpoint.WriteFile(path, func(w io.Writer) {
		w.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(text))))
		w.Write(text)
		for _, name := range names {
			w.Write(tensors[name].data.Bytes())
		}
	})
}

// maxHeader is how long a header may be: what other readers take, 100 MB.
const maxHeader = 100_000_000

// readTensors reads what writeTensors has written.
func readTensors(path string) (map[string]stored, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	tensors, err := decodeTensors(bufio.NewReader(f), info.Size())
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return tensors, nil
}

// readRemarks reads the metadata of a file of so many bytes.
func readRemarks(r io.Reader, size int64) (said remarks, err error) {
	raw, _, err := decodeHeader(r, size)
	if err != nil {
		return said, err
	}
	return takeRemarks(raw)
}

// decodeTensors reads a file of so many bytes.
func decodeTensors(r io.Reader, size int64) (map[string]stored, error) {
	raw, n, err := decodeHeader(r, size)
	if err != nil {
		return nil, err
	}
	said, err := takeRemarks(raw)
	if err != nil {
		return nil, err
	}
	entries, err := decodeEntries(raw, size-8-n)
	if err != nil { // before memory is taken for them
		return nil, err
	}
	data := make([]byte, size-8-n)
	if _, err := io.ReadFull(r, data); err != nil {
		return nil, err
	}
	if said.Checksum != "" {
		sum := checksum(raw)
		sum.Write(data)
		if is := checkpoint.Text(sum); is != said.Checksum {
			return nil, damaged(is, said.Checksum)
		}
	}
	tensors := map[string]stored{}
	for name, e := range entries {
		t, err := e.decode(data)
		if err != nil {
			return nil, fmt.Errorf("tensor %q: %w", name, err)
		}
		tensors[name] = t
	}
	return tensors, nil
}

// decodeHeader reads the header of a file of so many bytes, and returns its length.
func decodeHeader(r io.Reader, size int64) (raw map[string]json.RawMessage, n int64, err error) {
	var prefix [8]byte
	if _, err := io.ReadFull(r, prefix[:]); err != nil {
		return nil, 0, fmt.Errorf("no length of a header: %w", err)
	}
	long := binary.LittleEndian.Uint64(prefix[:])
	if long > maxHeader || int64(long) > size-8 {
		return nil, 0, fmt.Errorf("a header of %d bytes in a file of %d", long, size)
	}
	text := make([]byte, long)
	if _, err := io.ReadFull(r, text); err != nil {
		return nil, 0, err
	}
	if err := json.Unmarshal(text, &raw); err != nil {
		return nil, 0, fmt.Errorf("its header is not JSON: %w", err)
	}
	return raw, int64(long), nil
}

// takeRemarks removes the metadata from a header and returns it.
func takeRemarks(header map[string]json.RawMessage) (said remarks, err error) {
	text, ok := header[remarksName]
	if !ok {
		return said, nil
	}
	delete(header, remarksName)
	if err := json.Unmarshal(text, &said); err != nil {
		return said, fmt.Errorf("its %s: %w", remarksName, err)
	}
	return said, nil
}

// decodeEntries returns the entries of the tensors in a header. They must cover all nbytes of the
// data, without overlap.
func decodeEntries(header map[string]json.RawMessage, nbytes int64) (map[string]entry, error) {
	entries, sum := map[string]entry{}, int64(0)
	for name, text := range header {
		var e entry
		if err := json.Unmarshal(text, &e); err != nil {
			return nil, fmt.Errorf("tensor %q: %w", name, err)
		}
		from, to := int64(e.Offsets[0]), int64(e.Offsets[1])
		if from < 0 || to < from || to > nbytes {
			return nil, fmt.Errorf("tensor %q has bytes %d to %d, and the file has %d: it is "+
				"damaged, load another checkpoint", name, from, to, nbytes)
		}
		entries[name] = e
		sum += to - from
	}
	if sum != nbytes {
		return nil, fmt.Errorf("its tensors have %d bytes, and the file has %d for them: the "+
			"file is damaged, load another checkpoint", sum, nbytes)
	}
	return entries, nil
}

// decode returns the tensor of an entry, whose bytes are among data.
func (e entry) decode(data []byte) (t stored, err error) {
	d, err := backend.ParseDType(strings.ToLower(e.DType))
	if err != nil {
		return t, err
	}
	from, to := e.Offsets[0], e.Offsets[1]
	n := (to - from) / d.Size()
	if left := (to - from) % d.Size(); left != 0 || !holds(e.Shape, n) {
		return t, fmt.Errorf("%d bytes for a shape of %v %s", to-from, e.Shape, e.DType)
	}
	// In its own memory, aligned to its elements.
	words := make([]int64, (to-from+7)/8)
	memory := backend.Of(words).As(backend.U8).Slice(0, to-from)
	copy(memory.Bytes(), data[from:to])
	return stored{e.Shape, memory.As(d)}, nil
}

// holds reports whether a shape has n elements.
func holds(shape []int, n int) bool {
	all := 1
	for i, d := range shape {
		if d == 0 { // whatever the others are
			return n == 0 && !slices.ContainsFunc(shape[i:], func(d int) bool { return d < 0 })
		}
		if d < 0 || all > n/d {
			return false
		}
		all *= d
	}
	return all == n
}
