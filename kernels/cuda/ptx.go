package cuda

import (
	"embed"
	"fmt"
	"io/fs"
	"iter"
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
// text for each family. From [Hopper] on, kernels may begin before those launched before
// them have ended.
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
		data, err := fs.ReadFile(dir, name)
		if err != nil {
			return nil, fmt.Errorf("PTX: %w", err)
		}
		text := string(data)
		if capability >= Hopper {
			text = early(text)
		}
		texts[family] = text
	}
	return texts, nil
}

// bodies yields the kernels of a PTX text: their names, and what comes behind those.
func bodies(ptx string) iter.Seq2[string, string] {
	return func(yield func(name, body string) bool) {
		for _, kernel := range strings.Split(ptx, "\n"+entryMark)[1:] {
			name, body, _ := strings.Cut(kernel, "(")
			if !yield(name, body) {
				return
			}
		}
	}
}

// entryMark is what a kernel's line begins with.
const entryMark = ".visible .entry "

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
