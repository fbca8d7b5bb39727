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
// text for each family. From [Hopper] on, kernels may begin before those launched before
// them have ended: see early.
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
		if capability >= Hopper && !newer {
			text = early(text)
		}
		texts[family] = text
	}
	return texts, nil
}

// early returns a text for older devices as one for Hopper, whose kernels may be put on the
// multiprocessors as those launched before them leave, and wait there, first of all, until all
// of these have ended and what they have written is there.
//
// Back to back, copies, casts, packs and permutes of 16 MiB take 1.3 to 2 us less so, and are 10
// to 23 % faster, those of 64 MiB 2 to 11 %; to launch one takes the host 0.9 us less. If they let
// the next one begin before they leave, they are between 3 % faster and 13 % slower, which is
// permutes whose rows are not aligned (H200, bench/results/2026-11-22-h200-early.txt, -kernels.txt).
func early(text string) string {
	var b strings.Builder
	inEntry := false
	for line := range strings.Lines(text) {
		switch {
		case strings.HasPrefix(line, ".version "):
			line = atLeast78(line)
		case strings.HasPrefix(line, ".target "):
			line = ".target sm_90\n"
		case strings.HasPrefix(line, ".visible .entry "):
			inEntry = true
		}
		b.WriteString(line)
		if inEntry && line == "{\n" {
			b.WriteString("\t" + wait + "\n")
			inEntry = false
		}
	}
	return b.String()
}

// atLeast78 returns the .version of a text, or 7.8, the first one for Hopper.
func atLeast78(line string) string {
	var major, minor int
	if _, err := fmt.Sscanf(line, ".version %d.%d", &major, &minor); err == nil && 10*major+minor < 78 {
		return ".version 7.8\n"
	}
	return line
}

// wait is what a kernel that may begin early says before it touches memory.
const wait = "griddepcontrol.wait;"

// traits are those of a text's kernels that launches depend on.
type traits struct {
	early bool // they may begin before those launched before them have ended
	peers bool // they wait for kernels of other devices
}

func traitsOf(ptx string) traits {
	return traits{early: strings.Contains(ptx, wait), peers: strings.Contains(ptx, ".sys.")}
}

// overtakes reports whether a kernel of t is to begin early behind one of last, which is zero
// where there is none.
//
// Of those that wait for peers, some let the next one in at once, which must then be one of
// these, too: they are small. A large one would keep those of another group off the device, for
// which the same devices may be waiting in their turn.
func (t traits) overtakes(last traits) bool { return t.early && (t.peers || !last.peers) }

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
