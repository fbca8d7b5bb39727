package cuda

import (
	"embed"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"strings"
)

//go:embed *.ptx
var modules embed.FS

// Hopper is the compute capability, 9.0 as 90, for which some families have a text of
// their own: it has instructions that older devices lack.
const Hopper = 90

// PTX returns the compiled kernels for devices of a compute capability (8.0 is 80), a
// text for each family.
func PTX(capability int) (map[string]string, error) { return textsIn(modules, capability) }

// PTXWith is PTX, but families that the directory dir has are taken from there: those of
// another compiler, to compare them. "" is none.
func PTXWith(dir string, capability int) (map[string]string, error) {
	texts, err := PTX(capability)
	if err != nil || dir == "" {
		return texts, err
	}
	others, err := textsIn(os.DirFS(dir), capability)
	if err == nil && len(others) == 0 {
		err = fmt.Errorf("%s has no file *.ptx", dir)
	}
	maps.Copy(texts, others)
	return texts, err
}

func textsIn(dir fs.FS, capability int) (map[string]string, error) {
	names, err := fs.Glob(dir, "*.ptx")
	if err != nil {
		return nil, err
	}
	texts := make(map[string]string, len(names))
	for _, name := range names {
		family, newer := strings.CutSuffix(strings.TrimSuffix(name, path.Ext(name)), ".sm_90")
		if _, found := texts[family]; newer && capability < Hopper || !newer && found {
			continue
		}
		text, err := fs.ReadFile(dir, name)
		if err != nil {
			return nil, fmt.Errorf("PTX: %w", err)
		}
		texts[family] = string(text)
	}
	return texts, nil
}

// beginsEarly reports whether the kernels in a PTX text may begin before those launched
// before them have ended: they wait for that themselves, first of all.
func beginsEarly(ptx string) bool { return strings.Contains(ptx, "griddepcontrol.wait;") }

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
