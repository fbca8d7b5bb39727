package backend

import (
	"fmt"
	"reflect"
	"strings"
)

// Given returns an [ErrArgument] that names the first nil among the arguments of a function, or
// nil. They come as names and values: pointers, interfaces, functions, or slices of these, whose
// elements are checked. Other values never count as nil. The function is "" if the caller's error
// names it.
//
//	err := backend.Given("autograd.New", "comm", comm, "params", params)
func Given(function string, arguments ...any) error {
	for i := 0; i+1 < len(arguments); i += 2 {
		if where := nilIn(reflect.ValueOf(arguments[i+1])); where != "" {
			if function != "" {
				function += ": "
			}
			return fmt.Errorf("%w: %s%v%s is nil", ErrArgument, function, arguments[i],
				strings.TrimRight(where, " "))
		}
	}
	return nil
}

// nilIn returns where a value is nil, "" for nowhere: " " for the value itself, " 2" for an
// element.
func nilIn(v reflect.Value) string {
	switch v.Kind() {
	case reflect.Invalid:
		return " "
	case reflect.Pointer, reflect.Func, reflect.Interface:
		if v.IsNil() {
			return " "
		}
	case reflect.Slice:
		for i := range v.Len() {
			e := v.Index(i)
			if e.Kind() == reflect.Interface {
				e = e.Elem()
			}
			if nilIn(e) == " " {
				return fmt.Sprintf(" %d", i)
			}
		}
	}
	return ""
}
