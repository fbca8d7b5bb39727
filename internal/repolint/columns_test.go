package repolint_test

import (
	"bytes"
	"cmp"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// mostColumns is the longest that a line of source or text may be; a tab counts as tabWidth.
const mostColumns, tabWidth = 100, 4

// mayBeLong are the kinds of lines that may be longer.
var mayBeLong = []*regexp.Regexp{
	regexp.MustCompile(`^\s*\|.*\|$`),               // a row of a table
	regexp.MustCompile(`https?://\S+`),              // an address
	regexp.MustCompile("`\\w+:\"[^`]*`(?: //.*)?$"), // a tag of a field
	regexp.MustCompile(`^\s*//go:`),                 // a directive
}

// generated is how a file says that a program has written it.
var generated = regexp.MustCompile(`(?m)^(?://|#|<!--) Code generated .* DO NOT EDIT`)

// written are the ends of names of files that people write.
var written = []string{
	".go", ".md", ".cu", ".cuh", ".cpp", ".h", ".c", ".s", ".py", ".sh", ".yaml", ".mk", "Makefile",
	"run", "gpu", // of .ci
}

func TestLinesHaveAtMostAHundredColumns(t *testing.T) {
	eachText(t, func(name string, text []byte) {
		for i, line := range tooLong(text) {
			t.Errorf("%s:%d has %d columns: at most %d", name, i, width(line), mostColumns)
		}
	})
}

// eachText calls look with each text that people write, in other modules here and in .ci, too.
// Measurements are left out.
func eachText(t *testing.T, look func(name string, text []byte)) {
	t.Helper()
	atRoot(t)
	require.NoError(t, filepath.WalkDir(".", func(name string, d fs.DirEntry, err error) error {
		aside := name == "bin" || filepath.Dir(name) == "bench/results" || name == "bench/out" ||
			d.Name() == "testdata" || d.Name()[0] == '.' && name != "." && name != ".ci"
		switch {
		case err != nil:
			return err
		case d.IsDir() && aside:
			return fs.SkipDir
		case d.IsDir() || !slices.Contains(written, cmp.Or(filepath.Ext(name), d.Name())):
			return nil
		}
		text, err := os.ReadFile(name)
		if err == nil && !generated.Match(text[:min(len(text), 1024)]) {
			look(filepath.ToSlash(name), text)
		}
		return err
	}))
}

// tooLong returns the lines of a text that are too long, by their numbers.
func tooLong(text []byte) map[int]string {
	long := map[int]string{}
	for i, line := range bytes.Split(text, []byte("\n")) {
		s := string(line)
		free := slices.ContainsFunc(mayBeLong, func(kind *regexp.Regexp) bool {
			return kind.MatchString(s)
		})
		if width(s) > mostColumns && !free {
			long[i+1] = s
		}
	}
	return long
}

// width is how many columns a line takes.
func width(line string) int {
	return utf8.RuneCountInString(line) + (tabWidth-1)*strings.Count(line, "\t")
}

func TestLongLinesAreFound(t *testing.T) {
	word := strings.Repeat("x", mostColumns)
	for line, want := range map[string]bool{
		word:                             false,
		word + "x":                       true,
		"\t" + word[tabWidth:]:           false,
		"\t" + word[tabWidth-1:]:         true,
		"// https://" + word:             false,
		"| " + word + " |":               false,
		"//go:embed " + word:             false,
		strings.Repeat("é", mostColumns): false,
		"// " + word:                     true,
	} {
		require.Equal(t, fmt.Sprintf("%.20q, of %d columns: too long", line, width(line)),
			len(tooLong([]byte("\n"+line+"\n"))) > 0, want)
	}
}
