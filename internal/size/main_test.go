package main

import (
	"strings"
	"testing"
)

func TestLinesLeaveOutBlanksAndComments(t *testing.T) {
	if n := lines([]byte("package a\n\n// A comment.\n\t// Another.\nvar x = 1 // code\n"), "//"); n != 2 {
		t.Errorf("%d lines, want 2", n)
	}
}

func TestIdentifiersAreThoseOfThePackage(t *testing.T) {
	const text = `package a
type T struct{ Field int }
func (T) Method() {}
func F() {}
func f() {}
const (
	A, b = 1, 2
	C    = 3
)
`
	n, err := identifiers("a.go", []byte(text))
	if err != nil || n != 4 {
		t.Errorf("%d identifiers (%v), want T, F, A and C", n, err)
	}
	if n, err := identifiers("a.go", []byte(strings.Replace(text, "package a", "package main", 1))); err != nil || n != 0 {
		t.Errorf("%d identifiers of a command (%v), want 0", n, err)
	}
}

func TestScenariosAreTestsWithoutParts(t *testing.T) {
	const run = `{"Action":"run","Package":"p","Test":"TestA"}
{"Action":"pass","Package":"p","Test":"TestA/one"}
{"Action":"pass","Package":"p","Test":"TestA/two/three"}
{"Action":"pass","Package":"p","Test":"TestA/two"}
{"Action":"pass","Package":"p","Test":"TestA"}
{"Action":"skip","Package":"p","Test":"TestB"}
{"Action":"pass","Package":"q","Test":"TestA"}
{"Action":"pass","Package":"q"}
`
	if n, err := leaves(strings.NewReader(run)); err != nil || n != 3 {
		t.Errorf("%d scenarios (%v), want one, two/three and that of q", n, err)
	}
}

func TestOutputThatIsNoTestRunIsRefused(t *testing.T) {
	if _, err := leaves(strings.NewReader("ok p 0.1s\n")); err == nil || !strings.Contains(err.Error(), "go test -json") {
		t.Errorf("the error is %v", err)
	}
}
