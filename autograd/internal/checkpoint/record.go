package checkpoint

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"hash/crc32"
	"os"
	"regexp"

	"github.com/euryale-ml/euryale/internal/files"
)

// The files of a checkpoint: the record, the state that ranks share, and the state of each rank.
const (
	RecordName = "checkpoint.json"
	ModelName  = "model.safetensors"
)

// RankName is the name of a rank's own file.
func RankName(rank int) string { return fmt.Sprintf("rank%d.safetensors", rank) }

// fileNames are those that Save gives.
var fileNames = regexp.MustCompile(`^(checkpoint\.json|model\.safetensors|rank\d+\.safetensors)$`)

// MaxRecord is how many bytes a record may have.
const MaxRecord = 100_000_000

// Stamp is what a record says of a checkpoint as a whole. It is empty in those of older versions.
type Stamp struct {
	ID       string `json:"id"`       // of the Save
	Training string `json:"training"` // the Saves that may remove this one
	Name     string `json:"name"`     // of the directory
	Step     uint64 `json:"step"`     // since training began
	Save     int    `json:"save"`     // 1 for the first Save to the directory
	Pinned   bool   `json:"pinned,omitempty"`
	Best     string `json:"best,omitempty"` // id of the last Save that was pinned, up to this one
	Files    []File `json:"files"`
}

// File is a file of a checkpoint.
type File struct {
	Name     string `json:"name"`
	Bytes    int64  `json:"bytes"`
	Checksum string `json:"crc32c"` // of all bytes
}

// String names a Save, for messages.
func (s Stamp) String() string {
	if s.ID == "" {
		return "a Save of an older version"
	}
	return fmt.Sprintf("Save %.8s, step %d", s.ID, s.Step)
}

// Damaged is the error of a checkpoint that is not what Save has written.
type Damaged struct {
	Path     string
	Cause    error
	Diverged bool // it is as Save wrote it, but has a number that is not finite
}

// Error says what is wrong and what to do.
func (e *Damaged) Error() string {
	if e.Diverged {
		return fmt.Sprintf("%s: %v: its training had diverged, load another checkpoint", e.Path,
			e.Cause)
	}
	return fmt.Sprintf("%s: %v: it is damaged or incomplete, load another checkpoint",
		e.Path, e.Cause)
}

// Is reports whether target is a cause. A file that is missing is not "no checkpoint".
func (e *Damaged) Is(target error) bool {
	return target != os.ErrNotExist && errors.Is(e.Cause, target)
}

// damagedFile is a [*Damaged], unless the store that has the file does not answer: then nobody
// knows what is in it.
func damagedFile(path string, cause error) error {
	if errors.Is(cause, files.ErrUnreachable) {
		return cause
	}
	return &Damaged{Path: path, Cause: cause}
}

// table is of CRC-32C, the checksum of files and records.
func table() *crc32.Table { return crc32.MakeTable(crc32.Castagnoli) }

// NewChecksum returns the checksum of no bytes.
func NewChecksum() hash.Hash32 { return crc32.New(table()) }

// Text returns a checksum as it is written in files.
func Text(h hash.Hash32) string { return fmt.Sprintf("%08x", h.Sum32()) }

// The checksum of a record is its last member. It covers the text without it, on one line.
const seal = `,"crc32c":"%08x"}`

var sealed = regexp.MustCompile(`,"crc32c":"([0-9a-f]{8})"}$`)

// Seal returns the text of a record, a struct, with its checksum.
func Seal(record any) ([]byte, error) {
	text, err := json.Marshal(record)
	if err != nil {
		return nil, err
	}
	sum := crc32.Checksum(text, table())
	var out bytes.Buffer
	err = json.Indent(&out, fmt.Appendf(text[:len(text)-1], seal, sum), "", "  ")
	out.WriteByte('\n')
	return out.Bytes(), err
}

// unseal checks the checksum of a record. One that was written by hand need not have one.
func unseal(text []byte) error {
	var line bytes.Buffer
	if err := json.Compact(&line, text); err != nil {
		return err
	}
	found := sealed.FindSubmatch(line.Bytes())
	if found == nil {
		return nil
	}
	record := append(bytes.TrimSuffix(line.Bytes(), found[0]), '}')
	written := string(found[1])
	if is := fmt.Sprintf("%08x", crc32.Checksum(record, table())); is != written {
		return fmt.Errorf("its checksum is %s, it was written with %s", is, written)
	}
	return nil
}

// ReadRecord reads the record of the checkpoint in a directory. The error is a [*Damaged] if there
// is none, or one that Save has not written.
func ReadRecord(in files.Dir) (text []byte, s Stamp, err error) {
	info, err := in.Stat(RecordName)
	if err == nil && info.Size() > MaxRecord {
		err = fmt.Errorf("it has %d bytes, and a record has at most %d", info.Size(), MaxRecord)
	}
	if err == nil {
		text, err = in.Read(RecordName, MaxRecord)
	}
	if err == nil {
		if err = unseal(text); err == nil {
			err = json.Unmarshal(text, &s)
		}
	}
	if err != nil {
		return nil, Stamp{}, damagedFile(in.Path(RecordName), err)
	}
	return text, s, nil
}
