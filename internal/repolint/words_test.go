package repolint_test

import (
	"bytes"
	"go/ast"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// meanings are the words that have named several things, and for each the packages whose types of
// that name mean the same one.
var meanings = map[string]struct {
	is       string
	packages []string
}{
	"machine":  {"what runs a graph of Gorgonia", []string{"vm"}},
	"exchange": {"no type: say of what", nil},
	"call": {"a collective under way, as one rank or its hooks see it", []string{
		"backend", "backend/backendtest/...", "backend/compress/...", "internal/gpu",
		"internal/hierarchy", "backend/host", "backend/internal/hosted",
		"internal/testing/reference",
	}},
	"engine": {"what moves the data of a group's calls", []string{
		"backend/internal/hosted", "backend/mpi", "backend/tcp",
	}},
	"part":  {"a group that a split makes", []string{"internal/group", "internal/session"}},
	"place": {"where a rank runs", []string{"internal/hierarchy", "internal/group"}},
	"step":  {"an operation of a plan", []string{"internal/vm/exec", "internal/vm/plan"}},
}

// A word that names types of several packages means one thing in all of them.
func TestTypesOfOneNameMeanOneThing(t *testing.T) {
	atRoot(t)
	for _, f := range sources(t) {
		if f.test() {
			continue
		}
		pkg := path.Dir(f.name)
		for _, name := range typesOf(f.File) {
			m, ok := meanings[strings.ToLower(name)]
			require.Check(t, !ok || withinAny(pkg, m.packages),
				"%s: type %s: elsewhere this word is %s: take another", f.name, name, m.is)
		}
	}
}

// crooked is how a sentence says "is that of y", where it can name the thing or its owner.
var crooked = regexp.MustCompile(`\b(is|are|was|were|be)[\s/#*]+(that|those)[\s/#*]+of\b`)

func TestNoSentenceSaysIsThatOf(t *testing.T) {
	eachText(t, func(name string, text []byte) {
		for _, at := range crooked.FindAllIndex(text, -1) {
			if name != "internal/repolint/words_test.go" {
				t.Errorf("%s:%d: name the thing or its owner: %q", name,
					1+bytes.Count(text[:at[0]], []byte("\n")), text[at[0]:at[1]])
			}
		}
	})
}

// replaced are words of our own, and the field's in their place. Pages of measurements keep theirs.
var replaced = []struct {
	ours   *regexp.Regexp
	fields string
}{
	{regexp.MustCompile(`(?i)[^-]newcomer`), "replacement worker"},
	{regexp.MustCompile(`(?i)bequeath|\bwills\b|World\.Will\b`), "last report"},
	{regexp.MustCompile(`internal/late\b`), "straggler"},
	{regexp.MustCompile(`\bunpace\b`), "avoidBBR"},
	{regexp.MustCompile(`(?i)stranger`), "unauthenticated client"},
	{regexp.MustCompile(`(?i)[^"-]\bspares?\b`), "standby"},
	{regexp.MustCompile(`stood in collectives`), "blocked in collectives"},
	{regexp.MustCompile(`take part in time|(did|do) not come in time`), "did not join in time"},
	{regexp.MustCompile(`loss tiles`), "chunked cross-entropy"},
	{regexp.MustCompile(`by level;|WithShards\(levels?\b`), "stage, as ZeRO has them"},
	{regexp.MustCompile(`[rR]anks (may |can )?divide (the |all )?(learnables|param|weights)`),
		"shard"},
	{regexp.MustCompile(`[gG]roup divides|[rR]anks (that )?divide (sequences|experts|positions)`),
		"shard"},
	{regexp.MustCompile(`\bwords have shape|Embedding\(words\b|\bwords (Node|:= b\.Learn)`),
		"embedding, vocabulary"},
	{regexp.MustCompile(`room of (an |the )?experts?|experts? ha[sd] (no )?room`), "capacity"},
	{regexp.MustCompile(`[rR]anks? that (is|are) late\b|AwaitsLate|\blateLook\b`), "straggler"},
	{regexp.MustCompile(`\b(lent|lend)\(|func \(l \*Loaded\) write`), "unshard, load"},
	{regexp.MustCompile(`(?i)\bmatrix products?\b`), "matrix multiplication"},
	{regexp.MustCompile(`(times|those|table|measurements) (that are )?shipped|shipped table`),
		"built-in times"},
	{regexp.MustCompile(`ranks that divide the (positions|experts|rows)`), "split, shard"},
	{regexp.MustCompile(`ha[sd] the same bits on`), "bitwise identical"},
	{regexp.MustCompile(`\b(send|[^-]scatter|[^-]gather) bucket\b`),
		"all-reduce, reduce-scatter, all-gather"},
	{regexp.MustCompile(`steps? that runs? again\b`), "rematerialized"},
}

func TestTextsUseTheFieldsWords(t *testing.T) {
	eachText(t, func(name string, text []byte) {
		for _, r := range replaced {
			for _, at := range r.ours.FindAllIndex(text, -1) {
				if name != "internal/repolint/words_test.go" && name != "CHANGELOG.md" {
					t.Errorf("%s:%d: %s: say %s", name, 1+bytes.Count(text[:at[0]], []byte("\n")),
						text[at[0]:at[1]], r.fields)
				}
			}
		}
	})
}

// bare are names that do not say what is taken or begun, and words of our own for shards and for
// rematerialization.
var bare = []string{"again", "anew", "begin", "coming", "forget", "gather", "gathers", "hold",
	"lend", "lent", "rerun", "slot", "slots", "stay", "stays", "take", "taken", "takes", "whole"}

func TestNamesOfPlansSayWhatIsTaken(t *testing.T) {
	atRoot(t)
	for _, f := range sources(t) {
		if f.test() || !withinAny(path.Dir(f.name), []string{"internal/vm/lower",
			"internal/vm/plan", "internal/vm/proof"}) {
			continue
		}
		ast.Inspect(f.File, func(n ast.Node) bool {
			id, ok := n.(*ast.Ident)
			require.Check(t, !ok || !slices.Contains(bare, id.Name),
				"%s: %v: say of what, in the field's words: shard, full, all-gather, reshard, "+
					"rematerialize", f.name, n)
			return true
		})
	}
}

// verbs are names of functions that do not say of what.
var verbs = []string{"take", "begin", "gather", "whole", "forget", "end"}

// barely are the packages whose functions still have such names.
var barely = []string{
	"autograd/internal/checkpoint", "fit", "models/tokenizer", "internal/launch",
}

func TestFunctionsSayWhatTheyTake(t *testing.T) {
	atRoot(t)
	for _, f := range sources(t) {
		for _, decl := range f.Decls {
			d, ok := decl.(*ast.FuncDecl)
			if ok && slices.Contains(verbs, d.Name.Name) && !f.test() &&
				!withinAny(path.Dir(f.name), barely) {
				t.Errorf("%s: func %s: say of what", f.name, d.Name.Name)
			}
		}
	}
}

// Each row of meanings is of types that there are.
func TestMeaningsAreOfTypesThatThereAre(t *testing.T) {
	atRoot(t)
	used := map[string][]string{} // packages, by word
	for _, f := range sources(t) {
		for _, name := range typesOf(f.File) {
			word := strings.ToLower(name)
			used[word] = append(used[word], path.Dir(f.name))
		}
	}
	for word, m := range meanings {
		for _, pattern := range m.packages {
			if !slices.ContainsFunc(used[word], func(pkg string) bool {
				return within(pkg, pattern)
			}) {
				t.Errorf("no type is named %s in %s", word, pattern)
			}
		}
	}
}

// typesOf returns the names of the types that a file declares at its top level.
func typesOf(f *ast.File) (names []string) {
	for _, decl := range f.Decls {
		d, ok := decl.(*ast.GenDecl)
		if !ok {
			continue
		}
		for _, spec := range d.Specs {
			if s, ok := spec.(*ast.TypeSpec); ok {
				names = append(names, s.Name.Name)
			}
		}
	}
	return names
}
