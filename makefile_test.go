package euryale_test

import (
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
)

// make help describes every target, in a whole sentence.
func TestFoundMakeHelpCutsSentences(t *testing.T) {
	if _, err := exec.LookPath("make"); err != nil {
		t.Skip("needs make")
	}
	help, err := exec.Command("make", "--no-print-directory", "help").Output()
	if err != nil {
		t.Fatal(err)
	}
	described := map[string]bool{}
	for line := range strings.Lines(string(help)) {
		name, text, _ := strings.Cut(strings.TrimSpace(line), " ")
		described[name] = regexp.MustCompile(`^[A-Z][^.]*(\.\S[^.]*)*\.$`).MatchString(strings.TrimSpace(text))
		if !described[name] {
			t.Errorf("%q has no sentence", line)
		}
	}
	for _, file := range []string{"Makefile", "gpu.mk", "simd.mk"} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, list := range regexp.MustCompile(`(?m)^\.PHONY: (.*)$`).FindAllStringSubmatch(string(text), -1) {
			for name := range strings.FieldsSeq(list[1]) {
				if name != "always" && !described[name] { // always is no target of a person's
					t.Errorf("%s: make help does not describe %s", file, name)
				}
			}
		}
	}
}
