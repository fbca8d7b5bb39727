package checkpoint

import (
	"bufio"
	"encoding/json"
	"fmt"
	"hash"
	"io"
	"maps"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/safetensors"
	"github.com/euryale-ml/euryale/internal/stock"
)

// stored is a tensor in a file.
type stored = safetensors.Tensor

// Remarks say to which checkpoint a file belongs.
type Remarks struct {
	Save string // its id
	Step string
}

// The names of remarks in the metadata of a file. There is also a checksum of its entries, by name,
// and the data, which other readers ignore and other writers leave out; and the regions of tensors
// of which it has shards.
const checksumKey, saveKey, stepKey, shardsKey = "crc32c", "save", "step", "shards"

// metadata returns what is said in a file.
func (r Remarks) metadata(checksum string, shards map[string]Region) (map[string]string, error) {
	said := map[string]string{checksumKey: checksum, saveKey: r.Save, stepKey: r.Step}
	if len(shards) > 0 {
		text, err := json.Marshal(shards)
		if err != nil {
			return nil, err
		}
		said[shardsKey] = string(text)
	}
	maps.DeleteFunc(said, func(_, text string) bool { return text == "" })
	return said, nil
}

// shardsIn returns the regions of the shards in a file.
func shardsIn(h *safetensors.Header) (all map[string]Region, err error) {
	if text := h.Metadata[shardsKey]; text != "" {
		err = json.Unmarshal([]byte(text), &all)
	}
	return all, err
}

// Diverged says when an element was found that is not finite, and what to do.
func (r Remarks) Diverged(wrong error) error {
	if wrong == nil {
		return nil
	}
	if r.Step != "" {
		wrong = fmt.Errorf("after step %s: %w", r.Step, wrong)
	}
	return fmt.Errorf("%w: the model has diverged: go on from an earlier checkpoint, with a lower "+
		"rate, or with gradients bounded by vm.ClipNorm", wrong)
}

// checksum begins the checksum of a file; the data are to follow.
func checksum(entries map[string]json.RawMessage) hash.Hash32 {
	h := NewChecksum()
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

// WriteTensors writes tensors to a file with what is said of them, and of which regions they are if
// ranks shard them.
func WriteTensors(in files.Dir, name string, tensors []Tensor, said Remarks) (File, error) {
	return WriteFile(in, name, func(w io.Writer) error { return EncodeTensors(w, tensors, said) })
}

// EncodeTensors writes what a file of WriteTensors has. It refuses numbers that are not finite,
// and looks for them as it computes the checksum: all that is saved comes through here.
func EncodeTensors(w io.Writer, tensors []Tensor, said Remarks) error {
	all, shards := map[string]stored{}, map[string]Region{}
	for _, t := range tensors {
		if err := CheckName(t.Name); err != nil {
			return fmt.Errorf("tensor %q: %w", t.Name, err)
		}
		all[t.Name] = stored{Shape: t.Shape, Data: t.Data}
		if t.Merge == Divided {
			shards[t.Name] = t.Region
		}
	}
	entries, err := safetensors.Layout(all)
	if err != nil {
		return err
	}
	sum := checksum(entries)
	inOrder := slices.SortedFunc(slices.Values(tensors), func(a, b Tensor) int {
		return strings.Compare(a.Name, b.Name)
	})
	for _, t := range inOrder {
		if err := t.sum(sum); err != nil {
			return said.Diverged(err)
		}
	}
	metadata, err := said.metadata(Text(sum), shards)
	if err != nil {
		return err
	}
	return safetensors.Write(w, all, metadata)
}

// ReadTensors reads what WriteTensors has written.
func ReadTensors(in files.Dir, name string) (map[string]stored, error) {
	f, err := in.Open(name)
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
		return nil, fmt.Errorf("%s: %w", in.Path(name), err)
	}
	return tensors, nil
}

// readRemarks reads the metadata of a file of so many bytes.
func readRemarks(r io.Reader, size int64) (said Remarks, err error) {
	h, err := safetensors.ReadHeader(r, size)
	if err != nil {
		return said, err
	}
	return Remarks{h.Metadata[saveKey], h.Metadata[stepKey]}, nil
}

// decodeTensors reads a file of so many bytes.
func decodeTensors(r io.Reader, size int64) (map[string]stored, error) {
	all := map[string]stored{}
	_, err := decodeEach(r, size, func(*safetensors.Header) (bool, error) { return true, nil },
		func(name string, t stored) { all[name] = t })
	return all, err
}

// decodeEach reads a file of so many bytes, if it is needed, and hands over its tensors one by one.
func decodeEach(r io.Reader, size int64, needs func(*safetensors.Header) (bool, error),
	take func(name string, t stored)) (needed bool, err error) {
	h, err := safetensors.ReadHeader(r, size)
	if err != nil {
		return false, fmt.Errorf("%w: load another checkpoint", err)
	}
	if needed, err = needs(h); err != nil || !needed {
		return false, err
	}
	sum := checksum(h.Texts)
	if err := h.Each(io.TeeReader(r, sum), take); err != nil {
		return false, err
	}
	if is, said := Text(sum), h.Metadata[checksumKey]; said != "" && is != said {
		return false, damaged(is, said)
	}
	return true, nil
}

// SolverPrefix begins the names of what solvers keep.
const SolverPrefix = "solver."

// CheckName returns an error for a name that a file cannot give to a tensor.
func CheckName(name string) error {
	switch {
	case name == "" || name == stock.Unnamed:
		return fmt.Errorf("%w: it has no name", backend.ErrArgument)
	case !utf8.ValidString(name):
		return fmt.Errorf("%w: its name is not UTF-8", backend.ErrArgument)
	case name == safetensors.MetadataName:
		return fmt.Errorf("%w: the file's metadata has this name", backend.ErrArgument)
	}
	return nil
}
