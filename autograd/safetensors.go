package autograd

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"hash"
	"io"
	"maps"
	"slices"

	"github.com/euryale-ml/euryale/autograd/internal/checkpoint"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/safetensors"
)

// The metadata of safetensors files of this package contain a checksum, which other readers ignore.
// Files of other writers need not have one.

// stored is a tensor in a file.
type stored = safetensors.Tensor

// remarks are the metadata.
type remarks struct {
	checksum string // of the entries, by name, and the data
	save     string // the id of the checkpoint that the file belongs to
	step     string // of that checkpoint
	shards   string // JSON: the regions of the tensors that are shards, by name
}

// The names of remarks in a file.
const checksumKey, saveKey, stepKey, shardsKey = "crc32c", "save", "step", "shards"

// metadata returns the remarks as they are in a file.
func (r remarks) metadata() map[string]string {
	said := map[string]string{checksumKey: r.checksum, saveKey: r.save, stepKey: r.step,
		shardsKey: r.shards}
	maps.DeleteFunc(said, func(_, text string) bool { return text == "" })
	return said
}

// remarksOf returns the remarks in a header.
func remarksOf(h *safetensors.Header) remarks {
	return remarks{h.Metadata[checksumKey], h.Metadata[saveKey], h.Metadata[stepKey],
		h.Metadata[shardsKey]}
}

// diverged says when an element was found that is not finite, and what to do.
func (r remarks) diverged(wrong error) error {
	if wrong == nil {
		return nil
	}
	if r.step != "" {
		wrong = fmt.Errorf("after step %s: %w", r.step, wrong)
	}
	return fmt.Errorf("%w: the model has diverged: go on from an earlier checkpoint, with a lower "+
		"rate, or with gradients bounded by vm.ClipNorm", wrong)
}

// regions returns where the tensors belong that are shards, by name.
func (r remarks) regions() (all map[string]region, err error) {
	if r.shards != "" {
		err = json.Unmarshal([]byte(r.shards), &all)
	}
	return all, err
}

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
func vector(b backend.Buffer) stored { return stored{Shape: []int{b.Len()}, Data: b} }

// writeTensors writes tensors to a file, by name, with what is said of them.
func writeTensors(
	path string, tensors map[string]stored, said remarks, rule finiteness,
) (f checkpoint.File, err error) {
	var failed error
	f, err = checkpoint.WriteFile(path, func(w io.Writer) {
		failed = encodeTensors(w, tensors, said, rule)
	})
	return f, cmp.Or(failed, err)
}

// encodeTensors writes what a file of writeTensors has. It refuses numbers that are not finite,
// and looks for them as it computes the checksum: all that is saved comes through here.
func encodeTensors(w io.Writer, tensors map[string]stored, said remarks, rule finiteness) error {
	names := slices.Sorted(maps.Keys(tensors))
	for _, name := range names {
		if err := checkName(name); err != nil {
			return fmt.Errorf("tensor %q: %w", name, err)
		}
	}
	entries, err := safetensors.Layout(tensors)
	if err != nil {
		return err
	}
	sum := checksum(entries)
	for _, name := range names {
		if err := rule.sum(sum, name, tensors[name]); err != nil {
			return said.diverged(err)
		}
	}
	said.checksum = checkpoint.Text(sum)
	return safetensors.Write(w, tensors, said.metadata())
}

// readTensors reads what writeTensors has written.
func readTensors(path string) (map[string]stored, error) {
	f, err := files.Open(path)
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
	h, err := safetensors.ReadHeader(r, size)
	if err != nil {
		return said, err
	}
	return remarksOf(h), nil
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
	if said := remarksOf(h); said.checksum != "" {
		if is := checkpoint.Text(sum); is != said.checksum {
			return false, damaged(is, said.checksum)
		}
	}
	return true, nil
}
