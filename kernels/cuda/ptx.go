package cuda

import (
	"embed"
	"fmt"
	"io/fs"
	"path"
	"strings"
)

//go:embed *.ptx
var modules embed.FS

// PTX returns the compiled kernels, a text for each family.
func PTX() (map[string]string, error) {
	names, err := fs.Glob(modules, "*.ptx")
	if err != nil {
		return nil, err
	}
	texts := make(map[string]string, len(names))
	for _, name := range names {
		text, err := modules.ReadFile(name)
		if err != nil {
			return nil, fmt.Errorf("embedded PTX: %w", err)
		}
		texts[strings.TrimSuffix(name, path.Ext(name))] = string(text)
	}
	return texts, nil
}

// Entries lists the kernels in a PTX text.
func Entries(ptx string) ([]Entry, error) {
	var entries []Entry
	for line := range strings.Lines(ptx) {
		name, found := strings.CutPrefix(line, ".visible .entry ")
		if !found {
			continue
		}
		e, err := parseEntry(strings.TrimRight(name, "(\n"))
		if err != nil {
			return nil, err
		}
		entries = append(entries, e)
	}
	return entries, nil
}

// Entry names a kernel. Its parts are kept apart so that naming one costs no
// allocation.
type Entry struct {
	Verb string
	Op   string // "" where the verb says all
	Type string // a dtype, or the bits of what is moved
}

// String returns the name in the PTX: "reduce_sum_f32".
func (e Entry) String() string {
	if e.Op == "" {
		return e.Verb + "_" + e.Type
	}
	return e.Verb + "_" + e.Op + "_" + e.Type
}

func parseEntry(name string) (Entry, error) {
	switch parts := strings.Split(name, "_"); len(parts) {
	case 2:
		return Entry{Verb: parts[0], Type: parts[1]}, nil
	case 3:
		return Entry{Verb: parts[0], Op: parts[1], Type: parts[2]}, nil
	}
	return Entry{}, fmt.Errorf("kernel %q is not named verb_op_dtype", name)
}
