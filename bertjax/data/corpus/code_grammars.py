# SPDX-License-Identifier: Apache-2.0
"""The names that tree-sitter's grammars of Java and TypeScript give to parts of code.

The `comments` of a language are removed. code_names.py reads the captures of its
`parts`, which have these names:

  name       an identifier
  class      the identifier of a type: a class, an interface, a type parameter
  mark       the identifier of an annotation or a decorator
  call       the identifier of a method, if methods have their own namespace (Java)
  property   an identifier after a dot, of any object; own: of this
  imported   the identifier of a class that another file declares
  scope      the scope of names that are known from their declaration on
  body       the body of a class, in all of which its members are known

The captures of its `declarations` are one of the following. Each comes with its `type`,
with the class of the `new` object that initializes it, or with the literal that does (a
`string`, `number` or `boolean`); `dims` are brackets after the name:

  local      known from here to the end of its scope
  function   known in all of its scope
  member     a member of the class with this body; method: the same for a `call`
  owner      the class with this `body`
  of         a property of the name `object`
"""

from importlib import metadata
from typing import NamedTuple


class Grammar(NamedTuple):
    """A language: its parser (`package`'s `function`), and its queries.

    bare: whether members can be used without this.
    """

    package: str
    function: str
    comments: str
    parts: str
    declarations: str
    bare: bool


_JAVA = Grammar(
    "tree_sitter_java",
    "language",
    "[(line_comment) (block_comment)] @comment",
    """
[(identifier) (type_identifier)] @name
(type_identifier) @class
(_ name: (identifier) @class body: [(class_body) (interface_body) (enum_body)
 (annotation_type_body) (constructor_body)])
[(marker_annotation name: (identifier) @mark) (annotation name: (identifier) @mark)]
[(method_invocation name: (_) @call) (method_declaration name: (_) @call)]
[(method_invocation object: (_) name: (_) @property) (field_access field: (_)
 @property) (scoped_identifier name: (_) @property)]
[(method_invocation object: (this) name: (_) @own) (field_access object: (this)
 field: (_) @own)]
(import_declaration . "import" . (scoped_identifier name: (_) @imported))
[(block) (constructor_body) (method_declaration) (constructor_declaration)
 (record_declaration)
 (lambda_expression) (for_statement) (enhanced_for_statement) (catch_clause)
 (try_with_resources_statement) (switch_block_statement_group) (switch_rule)] @scope
[(class_body) (interface_body) (enum_body) (annotation_type_body)] @body
""",
    """
(local_variable_declaration type: (_) @type declarator: (variable_declarator
 name: (identifier) @local dimensions: (_)? @dims))
(local_variable_declaration declarator: (variable_declarator name: (identifier) @local
 value: (object_creation_expression type: (_) @new)))
(formal_parameter type: (_) @type name: (identifier) @local dimensions: (_)? @dims)
(spread_parameter (_) @type . "..." @dims (variable_declarator
 name: (identifier) @local))
(catch_formal_parameter (catch_type) @type name: (identifier) @local)
(enhanced_for_statement type: (_) @type name: (identifier) @local)
(resource type: (_) @type name: (identifier) @local)
(instanceof_expression right: (_) @type name: (identifier) @local)
[(inferred_parameters (identifier) @local)
 (lambda_expression parameters: (identifier) @local)]
(field_declaration type: (_) @type declarator: (variable_declarator
 name: (identifier) @member dimensions: (_)? @dims))
(constant_declaration type: (_) @type declarator: (variable_declarator
 name: (identifier) @member dimensions: (_)? @dims))
(method_declaration type: (_) @type name: (identifier) @method)
(annotation_type_element_declaration type: (_) @type name: (identifier) @method)
(enum_declaration name: (identifier) @type body: (enum_body (enum_constant
 name: (identifier) @member)))
(_ name: (identifier) @owner body: [(class_body) (interface_body) (enum_body)] @body)
(field_access object: (identifier) @object field: (identifier) @of)
(method_invocation object: (identifier) @object name: (identifier) @of)
""",
    bare=True,
)

_TYPESCRIPT = Grammar(
    "tree_sitter_typescript",
    "language_typescript",
    "(comment) @comment",
    """
[(identifier) (type_identifier) (property_identifier) (private_property_identifier)
 (shorthand_property_identifier) (shorthand_property_identifier_pattern)] @name
[(type_identifier) @class (new_expression constructor: (identifier) @class)
 (extends_clause value: (identifier) @class) (enum_declaration
 name: (identifier) @class)]
[(decorator (identifier) @mark) (decorator (call_expression function: (identifier)
 @mark))]
[(property_identifier) (private_property_identifier)] @property
(member_expression object: (this) property: (_) @own)
[(statement_block) (function_declaration) (function_expression) (arrow_function)
 (method_definition) (method_signature) (abstract_method_signature) (for_statement)
 (for_in_statement) (catch_clause) (switch_case) (switch_default)
 (function_signature) (function_type) (constructor_type) (call_signature)
 (construct_signature) (generator_function) (generator_function_declaration)] @scope
[(class_body) (interface_body) (object_type) (enum_body)] @body
""",
    """
(variable_declarator name: (identifier) @local type: (type_annotation (_) @type))
(variable_declarator name: (identifier) @local !type value: [(new_expression
 constructor: (identifier) @new) (string) @string (template_string) @string
 (number) @number (true) @boolean (false) @boolean])
(variable_declarator name: (identifier) @local !type)
(_ pattern: (identifier) @local type: (type_annotation (_) @type))
(_ pattern: (identifier) @local !type)
(_ (accessibility_modifier) pattern: (identifier) @member
 type: (type_annotation (_) @type))
[(arrow_function parameter: (identifier) @local)
 (for_in_statement left: (identifier) @local)
 (catch_clause parameter: (identifier) @local)
 (shorthand_property_identifier_pattern) @local]
(function_declaration name: (identifier) @function
 return_type: (type_annotation (_) @type))
(public_field_definition name: (property_identifier) @member
 type: (type_annotation (_) @type))
(public_field_definition name: (property_identifier) @member !type value: [
 (new_expression constructor: (identifier) @new) (string) @string
 (template_string) @string (number) @number (true) @boolean (false) @boolean])
(property_signature name: (property_identifier) @member
 type: (type_annotation (_) @type))
(method_definition name: (property_identifier) @member
 return_type: (type_annotation (_) @type))
(method_signature name: (property_identifier) @member
 return_type: (type_annotation (_) @type))
(abstract_method_signature name: (property_identifier) @member
 return_type: (type_annotation (_) @type))
(enum_declaration name: (identifier) @type body: (enum_body
 [(property_identifier) @member (enum_assignment name: (property_identifier)
 @member)]))
(_ name: [(identifier) (type_identifier)] @owner
 body: [(class_body) (interface_body) (enum_body)] @body)
(member_expression object: (identifier) @object property: (property_identifier) @of)
""",
    bare=False,
)

GRAMMARS = {
    "java": _JAVA,
    "typescript": _TYPESCRIPT,
    "tsx": _TYPESCRIPT._replace(function="language_tsx"),
}
CODE = "code-2"  # version of the rules of reading; part of the keys of stores
SUFFIXES = {".java": "java", ".ts": "typescript", ".tsx": "tsx"}


def code_rules(*languages: str) -> str:
    """Return the version of the rules of reading code, with the grammars' versions.

    Without arguments it covers all languages. A missing package has the version "".
    """
    packages = {GRAMMARS[name].package for name in languages or GRAMMARS}
    versions = []
    for package in sorted(packages):
        try:
            versions.append(metadata.version(package))
        except metadata.PackageNotFoundError:
            versions.append("")
    return f"{CODE}-{'-'.join(versions)}"
